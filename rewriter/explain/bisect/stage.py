"""One stage of a conversion, set beside the one before it and beside what it should compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from rewriter.explain.bisect.references import Expected
from rewriter.ir import Program

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Stage:
    """A program, the program before the pass that made it (None: as traced), the weights of both, and what it is
    compared with: on `ids`, int64 [B, S], within a relative error of `limit`."""

    name: str
    program: Program
    before: Program | None
    weights: Weights
    weights_before: Weights
    ids: torch.Tensor
    expected: Expected
    limit: float
    host: nn.Module | None = None

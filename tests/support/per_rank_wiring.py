"""Wirings of the per-rank rewrites and the steps of plain tensors that they are checked with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rewriter.check.per_rank_reference import LayerMode


def part(tensor: torch.Tensor, dim: int, rank: int, ranks: int) -> torch.Tensor:
    return tensor.chunk(ranks, dim)[rank]


def rotate(x_BHSD: torch.Tensor, size: int, base: float) -> torch.Tensor:
    """Rotary positions on the first `size` entries of each head."""
    angles = torch.outer(torch.arange(x_BHSD.shape[2]), base ** (-torch.arange(0, size, 2) / size)).double()
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    turned, rest = x_BHSD[..., :size], x_BHSD[..., size:]
    first, second = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, rest], -1)


def all_reduce(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(parts)).sum(0)


STANDARD, LADDER, OWN, PARALLEL = LayerMode(), LayerMode("ladder"), LayerMode("own_partial"), LayerMode("parallel")


def desync(*keep: bool, resync: Any = "mean") -> LayerMode:
    return LayerMode("desync", keep, resync)

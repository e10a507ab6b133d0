"""A run of `adapt` as all its parts read it: the checkpoint, the options, the data, the ranks and the directory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rewriter.adapt.data_set import RunData
from rewriter.adapt.models import Model
from rewriter.adapt.objective import evaluate
from rewriter.adapt.options import AdaptOptions
from rewriter.adapt.ranks import RunRanks
from rewriter.adapt.schedule import RunSizes
from rewriter.common.errors import RewriterError
from rewriter.common.run_context import RunContext
from rewriter.convert.rewritten_source import Opened


@dataclass(frozen=True)
class Run:
    """One call of `adapt` on one rank.

    settings: the Trainer's, from which `sizes` follow. place: the directory of the run while it goes on. original: the
    directory of the original model, None where it is not known.
    """

    opened: Opened
    options: AdaptOptions
    settings: Mapping[str, Any]
    data: RunData
    sizes: RunSizes
    ranks: RunRanks
    device: torch.device
    place: Path
    original: Path | None
    context: RunContext

    @property
    def source(self) -> Path:
        """The original model over the weights that training begins with."""
        return self.place / "source"

    @property
    def bf16(self) -> bool:
        return bool(self.settings.get("bf16"))

    def autocast(self) -> AbstractContextManager[None]:
        """The precision of a forward pass."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)

    def measured(self, model: Model) -> float:
        """The loss on the rows that are not trained on. Raises RewriterError where it is not finite."""
        batch = int(self.settings.get("per_device_eval_batch_size", self.sizes.micro_batch))
        loss = evaluate(model, self.data.held_out, batch, self.ranks, self.device, self.autocast)
        if not math.isfinite(loss):
            raise RewriterError(
                f"the loss on the evaluation rows is {loss}, although the weights were: the model computes beyond "
                "the range of its dtype. Leave out --set bf16 or fp16, or lower the learning rate"
            )
        return loss

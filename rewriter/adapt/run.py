"""What every part of a run reads: the checkpoint, the options, the data, the ranks and the directory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rewriter.adapt.evaluate import evaluate
from rewriter.adapt.options import Options, Schedule
from rewriter.adapt.run_data import RunData
from rewriter.adapt.run_ranks import RunRanks
from rewriter.adapt.students import Model
from rewriter.common.errors import RewriterError
from rewriter.convert.rewritten_source import Opened


@dataclass(frozen=True)
class Run:
    """One call of `adapt` on one rank.

    settings: the Trainer's, from which `sizes` follow. place: the directory of the run while it goes on. original: the
    directory of the original model, None where it is not known.
    """

    opened: Opened
    options: Options
    settings: Mapping[str, Any]
    data: RunData
    sizes: Schedule
    ranks: RunRanks
    device: torch.device
    place: Path
    original: Path | None
    progress: Callable[..., None]

    @property
    def source(self) -> Path:
        """The original model over the weights that training begins with."""
        return self.place / "source"

    @property
    def bf16(self) -> bool:
        return bool(self.settings.get("bf16"))

    @property
    def data_seed(self) -> int:
        """The seed of the order of rows."""
        return int(self.settings.get("data_seed", self.settings["seed"]))

    def measured(self, model: Model) -> float:
        """The loss on the rows that are not trained on. Raises RewriterError where it is not finite."""
        batch = int(self.settings.get("per_device_eval_batch_size", self.sizes.micro_batch))
        loss = evaluate(model, self.data.held_out, batch, self.ranks, self.device, self.bf16)
        if not math.isfinite(loss):
            raise RewriterError(
                f"the loss on the evaluation rows is {loss}, although the weights were: the model computes beyond "
                "the range of its dtype. Leave out --set bf16 or fp16, or lower the learning rate"
            )
        return loss

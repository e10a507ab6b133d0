"""What a run minimises, from its options: the data's loss, or the distance from the original model."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn

from rewriter.adapt import losses
from rewriter.adapt.run import Run
from rewriter.adapt.students import Batch, Model
from rewriter.adapt.trainer import Loss
from rewriter.adapt.trunk import Trunk


def loss_of(run: Run, theirs: Model | None, trunk: Trunk | None = None) -> Loss:
    """The loss that the options ask for, as sums over a rank's targets; `theirs` is the teacher of a distillation, and
    `trunk` what the student takes over from it."""
    options = run.options

    def autocast() -> contextlib.AbstractContextManager[None]:
        """The Trainer's covers the forward of its module alone, whose parts are called here one by one."""
        return torch.autocast(run.device.type, torch.bfloat16, enabled=run.bf16)

    def supervised(student: Model, batch: Batch, module: nn.Module) -> dict[str, Tensor]:
        with autocast():
            computed = student(batch, module)
        targets = losses.own_targets(batch["labels"], computed.indices)
        return {"loss": losses.cross_entropy(computed, targets)}

    def distilled(student: Model, batch: Batch, module: nn.Module) -> dict[str, Tensor]:
        assert theirs is not None
        with torch.no_grad(), autocast(), contextlib.nullcontext() if trunk is None else trunk.kept():
            taught = theirs(batch)
        with autocast(), contextlib.nullcontext() if trunk is None else trunk.given():
            computed = student(batch, module)
        targets = losses.own_targets(batch["labels"], computed.indices)
        kl = losses.divergence(computed, taught, targets, options.temperature)
        sums = {"loss": kl, "divergence": kl}
        if options.cross_entropy:
            ce = losses.cross_entropy(computed, targets)
            sums |= {"loss": kl + options.cross_entropy * ce, "cross_entropy": ce}
        return sums

    return supervised if options.method == "sft" else distilled

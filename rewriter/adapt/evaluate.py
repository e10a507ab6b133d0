"""The loss on rows that are not trained on: the mean over all their targets, on any number of ranks."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset, Subset

from rewriter.adapt import losses
from rewriter.adapt.batches import stack
from rewriter.adapt.run_ranks import RunRanks
from rewriter.adapt.students import Model
from rewriter.runtime.replicas import IGNORED
from rewriter.training.zero.comm_hooks import exact_weights

HELD_OUT = 0.02  # of the rows, where no evaluation data are given
MOST_HELD_OUT = 256


@torch.no_grad()
def evaluate(
    model: Model, rows: Dataset, batch: int, ranks: RunRanks, device: torch.device, bf16: bool = False
) -> float:
    """Mean cross entropy in nats per target, the same on every rank. The model's mode is restored."""
    training, count = model.module.training, len(rows)  # type: ignore[arg-type]
    model.module.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=device)  # the sum of this rank's losses, and how many they are
    with exact_weights(model.module):
        for start in range(0, count, batch * ranks.replicas):
            own = range(start + ranks.replica * batch, start + (ranks.replica + 1) * batch)
            # all ranks call the model equally often, with rows that ask for nothing where there are no more
            inputs = stack([rows[i] if i < count else _without_targets(rows[0]) for i in own])
            inputs = {name: value.to(device) for name, value in inputs.items()}
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                computed = model(inputs)
                targets = losses.own_targets(inputs["labels"], computed.indices)
                totals[0] += losses.cross_entropy(computed, targets).double()
            totals[1] += (targets != IGNORED).sum()
    if model.group is not None:
        ranks.sum(totals, model.group)
    model.module.train(training)
    return float(totals[0] / totals[1].clamp(min=1))


def _without_targets(row: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**row, "labels": torch.full_like(row["labels"], IGNORED)}


def hold_out(rows: Dataset, seed: int) -> tuple[Subset, Subset]:
    """(rows to train on, rows to evaluate on): some of them, drawn by the seed."""
    count = len(rows)  # type: ignore[arg-type]
    held = min(max(1, int(count * HELD_OUT)), MOST_HELD_OUT, count - 1)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return Subset(rows, sorted(order[held:])), Subset(rows, sorted(order[:held]))

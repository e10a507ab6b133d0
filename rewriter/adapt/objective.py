"""The losses of a run: what training minimises (cross entropy, divergence from the teacher), and on rows held out.

Losses are sums over this rank's targets. The loss of a step is the sum over all ranks and backward passes by the number
of their targets: a rank's part is its own sum over that number, times the data-parallel replicas, over which gradients
are averaged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from rewriter.adapt.models import Batch, Model, TokenStates, Trunk
from rewriter.adapt.options import AdaptOptions
from rewriter.adapt.ranks import RunRanks
from rewriter.runtime.replicas import IGNORED, next_tokens
from rewriter.training.zero.plus_plus import exact_weights

_CHUNK = 1 << 24  # logits in fp32 at a time: 64 MB
Loss = Callable[[Model, Batch, nn.Module], dict[str, Tensor]]
"""Sums over this rank's targets by name; "loss" is what is minimised."""


def loss_of(
    options: AdaptOptions,
    autocast: Callable[[], AbstractContextManager[None]],
    theirs: Model | None,
    trunk: Trunk | None,
) -> Loss:
    """The loss that the options ask for. autocast: the precision of a forward pass (the Trainer's covers the forward of
    its module alone, whose parts are called here one by one). theirs: the teacher of a distillation. trunk: the layers
    whose outputs the student takes over from it."""

    def supervised(student: Model, batch: Batch, module: nn.Module) -> dict[str, Tensor]:
        with autocast():
            computed = student(batch, module)
        return {"loss": cross_entropy(computed, own_targets(batch["labels"], computed.indices))}

    def distilled(student: Model, batch: Batch, module: nn.Module) -> dict[str, Tensor]:
        assert theirs is not None
        with torch.no_grad(), autocast(), contextlib.nullcontext() if trunk is None else trunk.kept():
            taught = theirs(batch)
        with autocast(), contextlib.nullcontext() if trunk is None else trunk.given():
            computed = student(batch, module)
        targets = own_targets(batch["labels"], computed.indices)
        kl = divergence(computed, taught, targets, options.temperature)
        sums = {"loss": kl, "divergence": kl}
        if options.cross_entropy:
            ce = cross_entropy(computed, targets)
            sums |= {"loss": kl + options.cross_entropy * ce, "cross_entropy": ce}
        return sums

    return supervised if options.method == "sft" else distilled


@torch.no_grad()
def evaluate(
    model: Model,
    rows: Dataset,
    batch: int,
    ranks: RunRanks,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> float:
    """Mean cross entropy in nats per target, the same on every rank. The model's mode is restored."""
    training, count = model.module.training, len(rows)  # type: ignore[arg-type]
    model.module.eval()
    empty = {**rows[0], "labels": torch.full_like(rows[0]["labels"], IGNORED)}
    totals = torch.zeros(2, dtype=torch.float64, device=device)  # the sum of this rank's losses, and how many they are
    with exact_weights(model.module):
        for start in range(0, count, batch * ranks.replicas):
            own = range(start + ranks.replica * batch, start + (ranks.replica + 1) * batch)
            # all ranks call the model equally often, with rows that ask for nothing where there are no more
            inputs = stack([rows[i] if i < count else empty for i in own])
            inputs = {name: value.to(device) for name, value in inputs.items()}
            with autocast():
                computed = model(inputs)
                targets = own_targets(inputs["labels"], computed.indices)
                totals[0] += cross_entropy(computed, targets).double()
            totals[1] += (targets != IGNORED).sum()
    if model.group is not None:
        ranks.sum(totals, model.group)
    model.module.train(training)
    return float(totals[0] / totals[1].clamp(min=1))


def stack(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Rows [S] as a batch [B, S]."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


# --- sums over targets


def own_targets(labels_BS: Tensor, indices_n: Tensor) -> Tensor:
    """int64 [B, n]: the targets of this rank's tokens, at places `indices_n` of the row: the label after each."""
    return next_tokens(labels_BS).index_select(1, indices_n)


def cross_entropy(computed: TokenStates, targets_Bn: Tensor) -> Tensor:
    """The sum of −log p(target), nats, fp32, over the targets that are not IGNORED."""
    chosen = targets_Bn.flatten() != IGNORED

    def part(states: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(computed.logits_of(states).float(), targets, reduction="sum")

    return _in_chunks(part, computed, computed.states.flatten(0, 1)[chosen], targets_Bn.flatten()[chosen])


def divergence(student: TokenStates, teacher: TokenStates, targets_Bn: Tensor, temperature: float = 1.0) -> Tensor:
    """The sum of T² · KL(teacher ‖ student) over positions that have a target, nats, fp32.

    Both distributions are softened by T; T² keeps the size of gradients (Hinton et al., arXiv 1503.02531, section 2).
    """
    chosen = targets_Bn.flatten() != IGNORED

    def part(own: Tensor, theirs: Tensor) -> Tensor:
        log_q = F.log_softmax(student.logits_of(own).float() / temperature, -1)
        with torch.no_grad():
            log_p = F.log_softmax(teacher.logits_of(theirs).float() / temperature, -1)
        return F.kl_div(log_q, log_p, reduction="sum", log_target=True)

    rows = [x.states.flatten(0, 1)[chosen] for x in (student, teacher)]
    return _in_chunks(part, student, *rows) * temperature**2


Part = Callable[..., Tensor]
"""A sum over some rows: of the student's states, and of what they are compared with."""


def _in_chunks(part: Part, student: TokenStates, *rows: Tensor) -> Tensor:
    """The sum of `part` over chunks of `rows`, the first of which are the student's. Of its head's logits one chunk is
    in memory at a time: the gradients of a chunk are computed before the next one begins."""
    head = student.head
    size = max(1, _CHUNK // max(1, student.states.shape[-1] if head is None else head.vocabulary))
    if head is not None and torch.is_grad_enabled():
        total: Tensor = _SumOfChunks.apply(part, size, rows[1:], head.weights, rows[0], *head.weights)
        return total
    parts = [part(*chunk) for chunk in zip(*(x.split(size) for x in rows), strict=True)]
    return torch.stack(parts).sum() if parts else 0 * rows[0].float().sum()


class _SumOfChunks(torch.autograd.Function):
    """With its gradients by the states [N, D] and by the weights of the head, which are known once it is computed."""

    @staticmethod
    def forward(
        ctx: Any, part: Part, size: int, others: Sequence[Tensor], weights: Sequence[Tensor], states: Tensor, *_: Tensor
    ) -> Tensor:
        total = states.new_zeros((), dtype=torch.float32)
        by_states = torch.zeros_like(states)
        by_weights = [torch.zeros_like(weight) for weight in weights]
        for start in range(0, len(states), size):
            place = slice(start, start + size)
            with torch.enable_grad():
                own = states[place].detach().requires_grad_()
                loss = part(own, *(other[place] for other in others))
                gradients = torch.autograd.grad(loss, [own, *weights], allow_unused=True)
            total += loss.detach()
            by_states[place] = gradients[0]
            for whole, gradient in zip(by_weights, gradients[1:], strict=True):
                if gradient is not None:
                    whole += gradient
        ctx.save_for_backward(by_states, *by_weights)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, None, None, *(saved * gradient for saved in ctx.saved_tensors)

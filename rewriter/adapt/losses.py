"""What is minimised: cross entropy, and divergence from the teacher's predictions.

Every function returns a sum over this rank's targets. The loss of a step is the sum over all ranks and backward passes
by the number of their targets: a rank's part is its own sum over that number, times the data-parallel replicas, over
which gradients are averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rewriter.adapt.students import Computed
from rewriter.runtime.replicas import IGNORED, next_tokens

_CHUNK = 1 << 24  # logits in fp32 at a time: 64 MB


def own_targets(labels_BS: Tensor, indices_n: Tensor) -> Tensor:
    """int64 [B, n]: what this rank's tokens, at places `indices_n` of the row, are asked for: the label after each."""
    return next_tokens(labels_BS).index_select(1, indices_n)


def count_targets(labels_BS: Tensor) -> int:
    """How many predictions rows ask for."""
    return int((next_tokens(labels_BS) != IGNORED).sum())


def cross_entropy(computed: Computed, targets_Bn: Tensor) -> Tensor:
    """The sum of −log p(target), nats, fp32, over the targets that are not IGNORED."""
    chosen = targets_Bn.flatten() != IGNORED

    def part(states: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(computed.logits_of(states).float(), targets, reduction="sum")

    return _in_chunks(part, computed, computed.states.flatten(0, 1)[chosen], targets_Bn.flatten()[chosen])


def divergence(student: Computed, teacher: Computed, targets_Bn: Tensor, temperature: float = 1.0) -> Tensor:
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


def _in_chunks(part: Part, student: Computed, *rows: Tensor) -> Tensor:
    """The sum of `part` over chunks of `rows`, the first of which are the student's. Of its head's logits one chunk is
    in memory at a time: the gradients of a chunk are computed before the next one begins."""
    size = max(1, _CHUNK // max(1, student.width()))
    if student.head is not None and torch.is_grad_enabled():
        weights = student.head_weights()
        total: Tensor = _SumOfChunks.apply(part, size, rows[1:], weights, rows[0], *weights)
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
                found = torch.autograd.grad(loss, [own, *weights], allow_unused=True)
            total += loss.detach()
            by_states[place] = found[0]
            for whole, gradient in zip(by_weights, found[1:], strict=True):
                if gradient is not None:
                    whole += gradient
        ctx.save_for_backward(by_states, *by_weights)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, None, None, *(saved * gradient for saved in ctx.saved_tensors)

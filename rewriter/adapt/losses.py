"""What is minimised: cross entropy, divergence from the teacher's predictions, distance from its hidden states.

Every function returns a sum over this rank's targets. The loss of a step is the sum over all ranks and backward passes
by the number of their targets: a rank's part is its own sum over that number, times the data-parallel replicas, over
which gradients are averaged.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rewriter.runtime.loss import IGNORED, next_tokens

_CHUNK = 1 << 24  # logits in fp32 at a time: 64 MB


def own_targets(labels_BS: Tensor, indices_n: Tensor) -> Tensor:
    """int64 [B, n]: what this rank's tokens, at places `indices_n` of the row, are asked for: the label behind each."""
    return next_tokens(labels_BS).index_select(1, indices_n)


def count_targets(labels_BS: Tensor) -> int:
    """How many predictions rows ask for."""
    return int((next_tokens(labels_BS) != IGNORED).sum())


def cross_entropy(logits_BnV: Tensor, targets_Bn: Tensor) -> Tensor:
    """The sum of −log p(target), nats, fp32, over the targets that are not IGNORED."""
    return F.cross_entropy(
        logits_BnV.flatten(0, 1).float(), targets_Bn.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def divergence(student_BnV: Tensor, teacher_BnV: Tensor, targets_Bn: Tensor, temperature: float = 1.0) -> Tensor:
    """The sum of T² · KL(teacher ‖ student) over positions that have a target, nats, fp32.

    Both distributions are softened by T; T² keeps the size of gradients (Hinton et al., arXiv 1503.02531, section 2).
    Chunked over positions, so that only one chunk's distributions are in fp32 at a time.
    """
    chosen = targets_Bn.flatten() != IGNORED
    student, teacher = (x.flatten(0, 1)[chosen] for x in (student_BnV, teacher_BnV))
    total = student.new_zeros((), dtype=torch.float32)
    size = max(1, _CHUNK // max(1, student.shape[-1]))
    for own, theirs in zip(student.split(size), teacher.split(size), strict=True):
        log_p = F.log_softmax(theirs.float() / temperature, -1)
        log_q = F.log_softmax(own.float() / temperature, -1)
        total = total + F.kl_div(log_q, log_p, reduction="sum", log_target=True)
    return total * temperature**2


def hidden_distance(student: Sequence[Tensor], teacher: Sequence[Tensor], targets_Bn: Tensor) -> Tensor:
    """The sum over positions that have a target of the mean over layers of |s − t|² / |t|², fp32.

    `student` and `teacher` are the residual stream [B, n, D] behind each layer.
    """
    chosen = targets_Bn.flatten() != IGNORED
    total = student[0].new_zeros((), dtype=torch.float32)
    for own, theirs in zip(student, teacher, strict=True):
        s, t = (x.flatten(0, 1)[chosen].float() for x in (own, theirs))
        total = total + ((s - t).square().sum(-1) / t.square().sum(-1).clamp_min(1e-6)).sum()
    return total / len(student)

"""Losses of a model and of what it is rewritten to, on the same tokens."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_ROWS = 16  # what is between stays in the processor's cache


@dataclass(frozen=True)
class Change:
    """What a rewrite changes on one window: sums in nats over the window's tokens.

    `divergence`: KL(original ‖ rewritten) over its `tokens` positions; `rise`: of the loss, over `predicted` tokens.
    """

    divergence: float
    rise: float
    tokens: int
    predicted: int


@dataclass(frozen=True)
class Rise:
    """Means over windows, nats per token, beside the original's `loss`.

    `rise`: by how much the rewritten model's loss is higher, with its standard `error` over windows. On a text that the
    model wrote itself that is `kl`, the mean KL(original ‖ rewritten): the rise that is expected, over all that the
    model could have written. `seen`: the rise on the words that stand there, with its standard error `seen_error`.
    """

    loss: float
    rise: float
    error: float
    kl: float
    seen: float = 0.0
    seen_error: float = 0.0

    @property
    def relative(self) -> float:
        """The rise as a share of the original's loss."""
        return self.rise / self.loss

    @property
    def relative_error(self) -> float:
        return self.error / self.loss


def rise_of(changes: Sequence[Change], loss: float, own: bool = False) -> Rise:
    """The means of windows where the original has `loss` nats per token; `own`: it wrote them itself."""
    kl = max(sum(c.divergence for c in changes) / sum(c.tokens for c in changes), 0.0)
    seen = sum(c.rise for c in changes) / sum(c.predicted for c in changes)
    kl_error = _error([c.divergence / c.tokens for c in changes])
    seen_error = _error([c.rise / c.predicted for c in changes])
    return Rise(loss, *((kl, kl_error) if own else (seen, seen_error)), kl, seen, seen_error)


def _error(each: Sequence[float]) -> float:
    """The standard error of a mean; of one value it is not known, and taken to be as large."""
    return statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else abs(each[0])


class Reference:
    """What the original predicts in one window: from its token ids, int64 [T], and logits [T, vocabulary]."""

    def __init__(self, ids: torch.Tensor, logits: torch.Tensor) -> None:
        self.following = ids[1:, None]
        self.log = logits.float().log_softmax(-1)
        self.loss = -float(self.log[:-1].gather(-1, self.following).double().sum())

    @property
    def nbytes(self) -> int:
        return self.log.nbytes

    def change(self, logits: torch.Tensor) -> Change:
        """What other logits [T, vocabulary] make of it."""
        divergence = loss = 0.0
        for first in range(0, len(logits), _ROWS):
            old, new = self.log[first : first + _ROWS], logits[first : first + _ROWS].float().log_softmax(-1)
            divergence += float(torch.linalg.vecdot(old.exp(), old - new).double().sum())
            following = self.following[first : first + _ROWS]
            loss -= float(new[: len(following)].gather(-1, following).double().sum())
        return Change(divergence, loss - self.loss, len(logits), len(logits) - 1)

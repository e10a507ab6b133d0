"""How the next token is chosen from logits, without a value that the host reads."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from rewriter.common.errors import RewriterError


@dataclass(frozen=True)
class Sampling:
    """Greedy at temperature 0; else a draw from softmax(logits / temperature), cut to the `top_k` likeliest and then to
    the likeliest whose probabilities reach `top_p`.

    Raises RewriterError for a value outside of its range, and for a cut where nothing is drawn.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        temperature, top_k, top_p = self.temperature, self.top_k, self.top_p
        for name, value, fits, expected in (
            ("temperature", temperature, math.isfinite(temperature) and temperature >= 0, "a number of at least 0"),
            ("top_k", top_k, top_k is None or top_k >= 1, "at least 1"),
            ("top_p", top_p, top_p is None or 0 < top_p <= 1, "more than 0 and at most 1"),
        ):
            if not fits:
                raise RewriterError(f"generate: {name} is {value}, expected {expected}")
        for name, cut_to in (("top_k", top_k), ("top_p", top_p)):
            if cut_to is not None and self.greedy:
                raise RewriterError(
                    f"generate: {name} is {cut_to}, but at temperature 0 the likeliest token is taken. Give a "
                    f"temperature, such as 1, or leave {name} out"
                )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def choose(self, logits_BV: Tensor, noise_BV: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Tokens int64 [B], and bool [B]: rows whose logits hold a NaN, or whose greatest is infinite.

        `noise_BV` is drawn from the exponential distribution; greedy choices need none. The draw is
        argmax(probability / noise), as `torch.multinomial` makes it, which also reads values on the host.
        """
        scores = logits_BV.float()
        if not self.greedy:
            assert noise_BV is not None
            scores = cut(scores / self.temperature, self.top_k, self.top_p).softmax(-1) / noise_BV
        greatest, token = scores.max(-1)  # a NaN is the greatest
        return token, ~greatest.isfinite() if self.greedy else greatest.isnan()  # noise near 0 makes a draw's infinite


def cut(logits: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """[B, V] with -inf for what is not among the `top_k` likeliest, then not among those that reach `top_p`, in the
    order in which transformers cuts."""
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if top_p is not None:
        ordered, order = logits.sort(dim=-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        beyond = (before >= top_p).scatter(1, order, before >= top_p)
        logits = logits.masked_fill(beyond & (logits < ordered[:, :1]), float("-inf"))
    return logits

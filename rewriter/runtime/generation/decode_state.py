"""The tokens of a batch while they are generated, and how the next one is chosen: static tensors on the model's device,
which no step reads on the host."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rewriter.common.errors import RewriterError
from rewriter.runtime.collectives.small_sums import small_gather


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


_ENDS = 8  # end-of-sequence tokens that there is room for; more need more


class DecodeState:
    """What is generated for `batch` rows, up to `capacity` tokens each, and how.

    token int64 [B, 1]: each row's last one. place int64 []: where it stands, left padding counted. first_valid int64
    [B]: the left padding. finished bool [B]. lengths int64 [B]: tokens up to the end of sequence. produced int64
    [capacity, B], of which `at` [1] is the next row. choice int64 [B]: the next tokens, not taken yet. stopped bool
    [B]: rows that the host ends with their next token. broken bool [B]: rows that had a NaN among their logits.
    """

    def __init__(self, batch: int, capacity: int, device: torch.device, group: ProcessGroup | None) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.batch, self.capacity, self.group = batch, capacity, group
        self.token, self.place, self.at = zeros(batch, 1), zeros(), zeros(1)
        self.first_valid, self.choice, self.lengths = zeros(batch), zeros(batch), zeros(batch)
        self.finished, self.stopped, self.broken = (zeros(batch, dtype=torch.bool) for _ in range(3))
        self.produced = zeros(capacity, batch)
        self.noise: Tensor | None = None  # [B, V], as soon as something is drawn
        self.random = torch.Generator(device)
        self.ends, self.pad = zeros(_ENDS), zeros()
        self.sampling, self.padded = Sampling(), False

    def begin(
        self, length: int, first_valid: Tensor | None, sampling: Sampling, seed: int, ends: Collection[int], pad: int
    ) -> None:
        """For prompts of `length` tokens, padding counted. What was generated before is gone."""
        for x in (self.at, self.lengths, self.finished, self.stopped, self.broken, self.first_valid):
            x.zero_()
        self.padded = first_valid is not None
        if first_valid is not None:
            self.first_valid.copy_(first_valid)
        self.place.fill_(length - 1)
        self.pad.fill_(pad)
        if len(ends) > len(self.ends):
            self.ends = self.ends.new_empty(len(ends))
        self.ends.fill_(-1)  # no token
        self.ends[: len(ends)] = torch.tensor(sorted(ends), dtype=torch.int64)
        self.sampling = sampling
        self.random.manual_seed(seed)

    def choose(self, logits_BV: Tensor) -> None:
        """The next tokens, by logits."""
        if not self.sampling.greedy:
            if self.noise is None:
                self.noise = torch.empty_like(logits_BV, dtype=torch.float32)
            self.noise.exponential_(generator=self.random)
        token, broken = self.sampling.choose(logits_BV, self.noise)
        self.choice.copy_(token)
        self.broken.logical_or_(broken & ~self.finished)

    def take(self) -> None:
        """The chosen tokens become the last ones; the first rank's on all ranks, which may differ by rounding."""
        token = torch.where(self.finished, self.pad, self.choice)
        ended = self.finished | self.stopped | (token[:, None] == self.ends).any(dim=1)
        if self.group is not None and self.group.size() > 1:
            both = torch.stack([token, ended.long()])
            if (of_all := small_gather(both, self.group)) is not None:
                both = of_all[0]
            else:
                dist.broadcast(both, group=self.group, group_src=0)
            token, ended = both[0], both[1].bool()
        self.produced.index_copy_(0, self.at, token[None])
        self.token.copy_(token[:, None])
        self.lengths += ~self.finished
        self.finished.copy_(ended)
        self.at += 1
        self.place += 1

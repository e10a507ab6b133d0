"""Tokens of each rank of a sequence axis: arithmetic progressions of positions, so that every tile of scores
is one of queries and keys at known positions.

Sequences are padded at the right to a multiple of the number of ranks (twice that for zigzag), so that all ranks hold
equally many tokens; positions from the global length on are padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

LayoutName = Literal["cyclic", "zigzag"]


@dataclass(frozen=True)
class TokenRun:
    """The positions start, start + step, …, `count` of them."""

    start: int
    step: int
    count: int

    @property
    def last(self) -> int:
        """The largest position; that before `start` where there is none."""
        return self.start + (self.count - 1) * self.step

    def below(self, length: int) -> TokenRun:
        """Its positions less than `length`: without the padding."""
        return TokenRun(self.start, self.step, max(0, min(self.count, -(-(length - self.start) // self.step))))

    def every(self, step: int, first: int) -> TokenRun:
        """Its elements first, first + step, …: indices, not positions."""
        return TokenRun(self.start + first * self.step, self.step * step, max(0, -(-(self.count - first) // step)))

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """int64 [count]."""
        return torch.arange(self.count, device=device) * self.step + self.start


@dataclass(frozen=True)
class TokenLayout:
    """Each of P ranks holds `chunks` runs of equally many tokens: `run(chunk, rank, ranks, tokens)`."""

    chunks: int
    run: Callable[[int, int, int, int], TokenRun]

    def local_tokens(self, length: int, ranks: int) -> int:
        """Tokens of each rank, padding included."""
        return padded(length, ranks * self.chunks) // ranks

    def runs(self, rank: int, ranks: int, length: int) -> tuple[TokenRun, ...]:
        """The runs of positions that `rank` holds, one after the other in its tensors."""
        tokens = self.local_tokens(length, ranks) // self.chunks
        return tuple(self.run(chunk, rank, ranks, tokens) for chunk in range(self.chunks))


def padded(length: int, multiple: int) -> int:
    """The least multiple of `multiple` that is no less than `length`, and at least `multiple`."""
    return max(1, -(-length // multiple)) * multiple


LAYOUTS: Mapping[LayoutName, TokenLayout] = {
    # the tokens t ≡ rank (mod ranks)
    "cyclic": TokenLayout(1, lambda _, rank, ranks, tokens: TokenRun(rank, ranks, tokens)),
    # of 2 · ranks equal chunks those at rank and 2 · ranks − 1 − rank: under a causal mask all ranks work alike
    "zigzag": TokenLayout(
        2, lambda chunk, rank, ranks, tokens: TokenRun((2 * ranks - 1 - rank if chunk else rank) * tokens, 1, tokens)
    ),
}


def runs(layout: LayoutName, rank: int, ranks: int, length: int) -> tuple[TokenRun, ...]:
    """The runs of positions that `rank` holds of a sequence of `length`."""
    return LAYOUTS[layout].runs(rank, ranks, length)


def indices(layout: LayoutName, rank: int, ranks: int, length: int, device: torch.device | str = "cpu") -> Tensor:
    """int64 [local tokens]: the position of each of a rank's tokens; `length` and above for padding."""
    return torch.cat([run.positions(device) for run in runs(layout, rank, ranks, length)])


def take_tokens(x: Tensor, dim: int, layout: LayoutName, rank: int, ranks: int, fill: float = 0) -> Tensor:
    """A rank's tokens of the full `x`, whose dimension `dim` is the sequence; padding is `fill`."""
    own = indices(layout, rank, ranks, x.shape[dim], x.device)
    missing = padded(x.shape[dim], ranks * LAYOUTS[layout].chunks) - x.shape[dim]
    if missing > 0:
        x = F.pad(x, [0, 0] * (x.dim() - 1 - dim % x.dim()) + [0, missing], value=fill)
    return x.index_select(dim, own)


def join_tokens(parts: Sequence[Tensor], dim: int, layout: LayoutName, length: int) -> Tensor:
    """The full sequence from every rank's tokens in rank order, without padding."""
    ranks = len(parts)
    order = torch.cat([indices(layout, rank, ranks, length, parts[0].device) for rank in range(ranks)])
    back = torch.argsort(order)[:length]
    return torch.cat(list(parts), dim).index_select(dim, back)

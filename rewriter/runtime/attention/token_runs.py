"""Which tokens each rank of a sequence axis holds: arithmetic progressions of positions, so that every tile of scores
is one of queries and keys at known positions.

Sequences are padded at the right to a multiple of the number of ranks (twice that for zigzag), so that all ranks hold
equally many tokens; positions from the global length on are padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Run:
    """The positions start, start + step, …, `count` of them."""

    start: int
    step: int
    count: int

    @property
    def last(self) -> int:
        """The largest position; that before `start` where there is none."""
        return self.start + (self.count - 1) * self.step

    def below(self, length: int) -> Run:
        """Its positions less than `length`: without the padding."""
        return Run(self.start, self.step, max(0, min(self.count, -(-(length - self.start) // self.step))))

    def every(self, step: int, first: int) -> Run:
        """Its elements first, first + step, …: indices, not positions."""
        return Run(self.start + first * self.step, self.step * step, max(0, -(-(self.count - first) // step)))

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """int64 [count]."""
        return torch.arange(self.count, device=device) * self.step + self.start


def padded(length: int, multiple: int) -> int:
    """The least multiple of `multiple` that is no less than `length`, and at least `multiple`."""
    return max(1, -(-length // multiple)) * multiple


def cyclic(rank: int, ranks: int, length: int) -> tuple[Run, ...]:
    """The tokens t ≡ rank (mod ranks) of a padded sequence of `length`."""
    return (Run(rank, ranks, padded(length, ranks) // ranks),)


def zigzag(rank: int, ranks: int, length: int) -> tuple[Run, ...]:
    """Chunks `rank` and 2 · ranks − 1 − rank of 2 · ranks equal ones: under a causal mask all ranks work alike."""
    chunk = padded(length, 2 * ranks) // (2 * ranks)
    return Run(rank * chunk, 1, chunk), Run((2 * ranks - 1 - rank) * chunk, 1, chunk)


def runs(layout: str, rank: int, ranks: int, length: int) -> tuple[Run, ...]:
    """The runs of positions that `rank` holds, one after the other in its tensors. `layout`: cyclic | zigzag."""
    return {"cyclic": cyclic, "zigzag": zigzag}[layout](rank, ranks, length)


def indices(layout: str, rank: int, ranks: int, length: int, device: torch.device | str = "cpu") -> Tensor:
    """int64 [local tokens]: the position of each of a rank's tokens; `length` and above for padding."""
    return torch.cat([run.positions(device) for run in runs(layout, rank, ranks, length)])


def take_tokens(x: Tensor, dim: int, layout: str, rank: int, ranks: int, fill: float = 0) -> Tensor:
    """A rank's tokens of the whole `x`, whose dimension `dim` is the sequence; padding is `fill`."""
    own = indices(layout, rank, ranks, x.shape[dim], x.device)
    missing = int(own.max()) + 1 - x.shape[dim]
    if missing > 0:
        x = F.pad(x, [0, 0] * (x.dim() - 1 - dim % x.dim()) + [0, missing], value=fill)
    return x.index_select(dim, own)


def join_tokens(parts: list[Tensor], dim: int, layout: str, length: int) -> Tensor:
    """The whole sequence from every rank's tokens in rank order, without padding."""
    ranks = len(parts)
    order = torch.cat([indices(layout, rank, ranks, length, parts[0].device) for rank in range(ranks)])
    back = torch.argsort(order)[:length]
    return torch.cat(parts, dim).index_select(dim, back)

"""Plans for distributed attention: how the tokens of a sequence are sharded, and how attention finds other ranks' keys.

Distributed attention has four facets, each with one place for every kind of plan (`SequenceKind`):

    layout      which tokens each rank holds       `SequencePlan.layout`, `LAYOUTS`
    messages    the exact bytes of every message   `rewriter.passes.sequence.distributed_attention`
    cost        estimates of memory and time       the same
    run         forward and backward on a rank     `rewriter.runtime.attention.sequence_axis`

Tokens of each rank are arithmetic progressions of positions, so that every tile of scores is one of queries and keys at
known positions. Sequences are padded at the right to a multiple of the number of ranks (twice that for zigzag), so that
all ranks hold equally many tokens; positions from the global length on are padding.
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


# --- plans


SequenceKind = Literal["attention2d", "ring", "ulysses"]
Grid = tuple[int, int, int]


@dataclass(frozen=True)
class KindFacts:
    """A kind of plan, for compiler and runtime. `grid`: the only one that P ranks can have, None where there are
    several; `called` names such ranks."""

    layout: LayoutName
    grid: Callable[[int], Grid | None] = lambda ranks: None
    called: str = ""


KINDS: Mapping[SequenceKind, KindFacts] = {
    "ring": KindFacts("zigzag", lambda ranks: (1, ranks, 1), "a ring of"),
    "ulysses": KindFacts("cyclic", lambda ranks: (ranks, 1, 1), "Ulysses on"),
    "attention2d": KindFacts("cyclic"),
}


@dataclass(frozen=True)
class SequencePlan:
    """Sharding of a sequence's tokens over the ranks of an axis, and how attention finds the keys of other ranks.

    `grid` is (heads, rows, columns): all-to-all by heads over the first, then queries gathered within a row and keys
    and values within a column (Attention2D, arXiv 2503.15758). (1, P, 1) of kind attention2d gathers keys and values
    alone. A ring has the grid (1, P, 1), Ulysses (P, 1, 1). `overlap`: computation block by block while the next blocks
    are on their way (the paper's Alg. 4 to 11); a ring always does.

    `quantized`: the format (`rewriter.kernels.parse_format`) in which keys and values travel; every rank then computes
    with the dequantized ones, its own among them. Where the keys and values of a rank's tokens have fewer than
    `min_bytes` bytes, all is exact.

    Rank p of P holds the tokens t ≡ p (mod P), "cyclic", or of a ring the chunks p and 2P − 1 − p of 2P, "zigzag".
    Raises ValueError for a grid that does not fit its kind.
    """

    kind: SequenceKind
    grid: Grid
    overlap: bool = False
    quantized: str | None = None
    min_bytes: int = 0

    def __post_init__(self) -> None:
        if min(self.grid) < 1:
            raise ValueError(f"grid {list(self.grid)}: every size is at least 1")
        facts = KINDS[self.kind]
        only = facts.grid(self.ranks)
        if only is not None and only != self.grid:
            raise ValueError(f"grid {list(self.grid)}: {facts.called} {self.ranks} has the grid {list(only)}")

    @property
    def ranks(self) -> int:
        heads, rows, columns = self.grid
        return heads * rows * columns

    @property
    def layout(self) -> LayoutName:
        return KINDS[self.kind].layout

    @property
    def multiple(self) -> int:
        """Sequences are padded at the right to a multiple of this number of tokens."""
        return self.ranks * LAYOUTS[self.layout].chunks

    def local_tokens(self, length: int) -> int:
        """The tokens that each rank holds of a sequence of `length`, with padding."""
        return LAYOUTS[self.layout].local_tokens(length, self.ranks)

    def __str__(self) -> str:
        text = f"{self.kind} {'×'.join(map(str, self.grid))}{' overlapped' if self.overlap else ''}"
        if self.quantized is not None:
            text += f", keys and values {self.quantized}"
            text += f" from {self.min_bytes:,} bytes" if self.min_bytes else ""
        return text

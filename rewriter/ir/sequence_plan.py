"""Plans for distributed attention: how the tokens of a sequence are sharded, and how attention finds other ranks' keys.

Distributed attention has four facets, each with one place for every kind of plan (`SequenceKind`):

    layout      which tokens each rank holds       `SequencePlan.layout`, `rewriter.ir.token_layout`
    messages    the exact bytes of every message   `rewriter.passes.sequence.distributed_attention`
    cost        estimates of memory and time       the same
    run         forward and backward on a rank     `rewriter.runtime.attention.sequence_axis`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from rewriter.ir.token_layout import LAYOUTS, LayoutName

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

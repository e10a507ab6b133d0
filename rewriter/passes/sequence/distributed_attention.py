"""Every kind of distributed attention as the compiler sees it: its plans and the exact bytes of their messages.

The bytes are those that `rewriter.runtime` counts (events of kind "wire"), so that predictions are tested by counting.
A rank receives as many bytes as it sends. Every layer's attention is planned alike; bytes are those of one layer.
What a rank runs is registered under the same kinds in `rewriter.runtime.attention.sequence_axis`; which tokens it
holds is `SequencePlan.layout`.

Symbols: P ranks as a grid of h heads × r rows × c columns, b sequences, n padded tokens of a rank, Hq query and Hkv
key/value heads, D size of a query or key head, E of a value head, e bytes of an element, s bytes of a log-sum-exp.
Keys and values that travel quantized have the bytes of their vectors instead of D · e and E · e: codes, scales and what
fills up a block.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from rewriter.common.errors import RewriterError
from rewriter.ir.attention_mask import visible_pairs
from rewriter.ir.ops import SequenceKind, SequencePlan
from rewriter.ir.sequence_plan import Grid
from rewriter.kernels import parse_format, vector_bytes


class DistributedAttention(ABC):
    """A kind of plan."""

    @abstractmethod
    def plans(self, ranks: int, asked: Grid | None = None) -> Iterator[SequencePlan]:
        """Every plan for `ranks` ranks, whether or not heads divide; also those that are made only when `asked` for."""

    @abstractmethod
    def travels(self, plan: SequencePlan) -> str:
        """Description of what ranks send each other."""

    @abstractmethod
    def messages(self, plan: SequencePlan, shape: AttentionShape, tokens: int, moving: bool) -> list[AttentionMessage]:
        """Those of a rank in one layer, in order, forward, then backward. `moving`: see `moves`."""

    @abstractmethod
    def kernel_calls(self, plan: SequencePlan, shape: AttentionShape) -> int:
        """Calls of a tile kernel in one pass of one layer."""

    def overlaps(self, plan: SequencePlan) -> bool:
        """True if blocks are computed while the next ones travel."""
        return plan.overlap

    def why_not_overlap(self, plan: SequencePlan) -> str:
        """Reason why a plan with the other `overlap` does not exist."""
        return f"{plan} has nothing to overlap"


class Ring(DistributedAttention):
    """Keys and values go round; in backward their gradients follow as running sums, to which the owner adds its own
    part last: P − 1 steps each (arXiv 2310.01889)."""

    def plans(self, ranks: int, asked: Grid | None = None) -> Iterator[SequencePlan]:
        if ranks > 1:
            yield SequencePlan("ring", (1, ranks, 1), overlap=True)

    def travels(self, plan: SequencePlan) -> str:
        return "kv go round"

    def overlaps(self, plan: SequencePlan) -> bool:
        return True

    def why_not_overlap(self, plan: SequencePlan) -> str:
        return "a ring always overlaps"

    def messages(self, plan: SequencePlan, shape: AttentionShape, tokens: int, moving: bool) -> list[AttentionMessage]:
        steps, kv = plan.ranks - 1, kv_bytes(plan, shape, tokens)
        elements = shape.batch * plan.local_tokens(tokens) * shape.kv_heads * (shape.head_dim + shape.value_dim)
        return [
            AttentionMessage("kv", "column", steps, steps * kv, False),
            AttentionMessage("kv", "column", steps, steps * kv, True),
            AttentionMessage("dkv", "column", steps, steps * elements * shape.accumulation_bytes, True, True),
        ]

    def kernel_calls(self, plan: SequencePlan, shape: AttentionShape) -> int:
        """Two runs of queries and of keys, of which two pairs see something per step, three at the rank's own."""
        return 2 * plan.ranks + 1 if shape.causal else 4 * plan.ranks


class Attention2D(DistributedAttention):
    """Alg. 1 and 3 of arXiv 2503.15758, or with `overlap` Alg. 4 to 11, between an exchange of heads before and after.

    Plans with and without overlap send the same bytes. After the exchange a rank holds h · n tokens of 1/h of the
    heads, so the elements of a block are those of n tokens and all heads; but each rank needs a full key/value head,
    hence max(Hkv, h) of them.
    """

    def plans(self, ranks: int, asked: Grid | None = None) -> Iterator[SequencePlan]:
        if ranks == 1 or asked == (ranks, 1, 1):  # all heads exchanged is Ulysses
            yield SequencePlan("attention2d", (ranks, 1, 1))
        sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
        for heads in sizes[:-1]:
            for rows in (size for size in sizes if ranks // heads % size == 0):
                for overlap in (False, True):
                    yield SequencePlan("attention2d", (heads, rows, ranks // heads // rows), overlap)

    def travels(self, plan: SequencePlan) -> str:
        heads, rows, columns = plan.grid
        sent = ["heads exchanged"] if heads > 1 else []
        if columns > 1:
            sent.append(f"q in rows of {columns}")
        if rows > 1:
            sent.append(f"kv in columns of {rows}")
        return ", ".join(sent)

    def messages(self, plan: SequencePlan, shape: AttentionShape, tokens: int, moving: bool) -> list[AttentionMessage]:
        heads, rows, columns = plan.grid
        size, head, value = shape.dtype_bytes, shape.head_dim, shape.value_dim
        local, kv = shape.batch * plan.local_tokens(tokens), kv_bytes(plan, shape, tokens)
        query_heads = local * shape.q_heads
        dkv = local * max(shape.kv_heads, heads) * (head + value) * size
        q, o = query_heads * head * size, query_heads * value * size
        lse = query_heads * shape.accumulation_bytes
        swap = int(moving)

        def exchanged(nbytes: int) -> int:
            return nbytes // heads * (heads - 1)  # full heads, so it divides

        return [
            AttentionMessage("qkv by heads", "heads", heads - 1, exchanged(q + kv), False),
            AttentionMessage("kv transposed", "plane", swap, swap * kv, False),
            AttentionMessage("q in the row", "row", columns - 1, (columns - 1) * q, False),
            AttentionMessage("kv in the column", "column", rows - 1, (rows - 1) * kv, False),
            AttentionMessage("o in the row", "row", columns - 1, (columns - 1) * (o + lse), False, True),
            AttentionMessage("o by heads", "heads", heads - 1, exchanged(o), False, True),
            AttentionMessage("do by heads", "heads", heads - 1, exchanged(o), True),
            AttentionMessage("q, o, do in the row", "row", columns - 1, (columns - 1) * (q + 2 * o + lse), True),
            AttentionMessage("kv in the column", "column", rows - 1, (rows - 1) * kv, True),
            AttentionMessage("dq in the row", "row", columns - 1, (columns - 1) * q, True, True),
            AttentionMessage("dkv in the column", "column", rows - 1, (rows - 1) * dkv, True, True),
            AttentionMessage("dkv transposed", "plane", swap, swap * dkv, True, True),
            AttentionMessage("dqkv by heads", "heads", heads - 1, exchanged(q + dkv), True, True),
        ]

    def kernel_calls(self, plan: SequencePlan, shape: AttentionShape) -> int:
        """Queries ≡ i (mod r) against keys ≡ j (mod c) are split at L = lcm(r, c), so that each part is plain or
        strictly causal: (L / r) · (L / c) calls. Overlapped, r · c pairs of blocks."""
        _, rows, columns = plan.grid
        if plan.overlap:
            return rows * columns
        return math.lcm(rows, columns) ** 2 // (rows * columns) if shape.causal else 1


class Ulysses(Attention2D):
    """All heads exchanged, then attention of all tokens on each rank (arXiv 2309.14509): a grid of (P, 1, 1)."""

    def plans(self, ranks: int, asked: Grid | None = None) -> Iterator[SequencePlan]:
        if ranks > 1:
            yield SequencePlan("ulysses", (ranks, 1, 1))


ALGORITHMS: Mapping[SequenceKind, DistributedAttention] = {
    "ring": Ring(),
    "ulysses": Ulysses(),
    "attention2d": Attention2D(),
}


def impossible(plan: SequencePlan, shape: AttentionShape) -> str | None:
    """Reason why attention of this shape cannot run so; None if it can."""
    heads, rows, columns = plan.grid
    if shape.q_heads % heads:
        return f"heads={heads} does not divide {shape.q_heads} query heads"
    if shape.kv_heads % heads and heads % shape.kv_heads:
        return (
            f"heads={heads} neither divides {shape.kv_heads} key/value heads nor is a multiple of them, so that ranks "
            "would need parts of several"
        )
    if plan.overlap and rows * columns == 1:
        return f"grid {list(plan.grid)} computes after one exchange of heads: there is nothing to overlap"
    return None


def moves(plan: SequencePlan, rank: int) -> bool:
    """True if the keys and values of `rank` change place before they are gathered (Alg. 1 line 1).

    Rank (i, j) of the r × c holds the tokens ≡ i + r · j (mod r · c) and gathers its column from ranks that hold the
    tokens ≡ j + c · i. They are the same on the ends of the grid's diagonal, and everywhere if r or c is 1.
    """
    _, rows, columns = plan.grid
    row, column = rank % rows, rank // rows % columns
    return row + rows * column != column + columns * row


def slowest(plan: SequencePlan) -> int:
    """A rank that sends most: one that transposes, where any does."""
    return next((rank for rank in range(plan.grid[1] * plan.grid[2]) if moves(plan, rank)), 0)


def messages(plan: SequencePlan, shape: AttentionShape, tokens: int, rank: int) -> tuple[AttentionMessage, ...]:
    """Every message of `rank` in one layer, in order, for sequences of `tokens`: forward, then backward.

    Raises RewriterError for a plan that is impossible.
    """
    reason = impossible(plan, shape)
    if reason is not None:
        raise RewriterError(f"{plan}: {reason}")
    if not 0 <= rank < plan.ranks:
        raise RewriterError(f"rank {rank}: {plan} has the ranks 0 to {plan.ranks - 1}")
    return tuple(m for m in ALGORITHMS[plan.kind].messages(plan, shape, tokens, moves(plan, rank)) if m.peers)


def wire_bytes(plan: SequencePlan, shape: AttentionShape, tokens: int, rank: int) -> WireBytes:
    """Bytes that `rank` receives in one layer, forward and backward; exact. Raises RewriterError as `messages` does."""
    sent = messages(plan, shape, tokens, rank)
    return WireBytes(
        sum(m.nbytes for m in sent if not m.backward),
        sum(m.nbytes for m in sent if m.backward),
    )


def axis_ranks(plan: SequencePlan, tensor_parallel: int = 1) -> dict[Axis, tuple[int, int]]:
    """(ranks, distance between neighbours) of each axis: tensor-parallel ranks are neighbours, then those of a column,
    of a row, and those that exchange heads, as in `rewriter.runtime.attention.mesh`."""
    heads, rows, columns = plan.grid
    places: dict[Axis, tuple[int, int]] = {
        "column": (rows, 1),
        "row": (columns, rows),
        "plane": (rows * columns, 1),
        "heads": (heads, rows * columns),
    }
    return {axis: (ranks, stride * tensor_parallel) for axis, (ranks, stride) in places.items()}


Axis = Literal["heads", "row", "column", "plane"]


@dataclass(frozen=True)
class AttentionShape:
    """One attention of a model on one tensor-parallel rank, and how many layers have it.

    Heads are those of the tensor-parallel rank. `dtype_bytes` are those of an element of q, k, v and o (8, 4 or 2).
    `window` is the size of a sliding window or chunk. It spares no bytes: cyclic tokens of a window are on all ranks.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    layers: int = 1
    batch: int = 1
    dtype_bytes: int = 2
    causal: bool = True
    window: int | None = None

    @property
    def accumulation_bytes(self) -> int:
        """Bytes of a log-sum-exp and of an element of a running sum: fp32, or fp64 for fp64."""
        return max(4, self.dtype_bytes)

    @property
    def groups(self) -> int:
        """Query heads that share a key/value head."""
        return self.q_heads // self.kv_heads

    def visible_pairs(self, tokens: int) -> int:
        """Pairs of a query and a key that it sees, of one head and sequence. A chunk counts as a window of its size."""
        return visible_pairs(tokens, self.causal, self.window)


@dataclass(frozen=True)
class AttentionMessage:
    """One exchange of a rank with `peers` other ranks of `axis`: `nbytes` received together, and as many sent.

    "row": the ranks of a row of the grid, which gather queries; "column": those of a column, which gather keys and
    values; a ring is a column. "plane": one other rank of the r × c. `results` go to their owners, operands to all who
    need them.
    """

    name: str
    axis: Axis
    peers: int
    nbytes: int
    backward: bool
    results: bool = False


@dataclass(frozen=True)
class WireBytes:
    """Bytes that one rank receives, and sends as many, for one layer."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


def quantizes(plan: SequencePlan, shape: AttentionShape, tokens: int) -> bool:
    """True if keys and values of sequences of `tokens` travel quantized: a rank has as many bytes of them."""
    exact = shape.kv_heads * (shape.head_dim + shape.value_dim) * shape.dtype_bytes
    return plan.quantized is not None and shape.batch * plan.local_tokens(tokens) * exact >= plan.min_bytes


def kv_bytes(plan: SequencePlan, shape: AttentionShape, tokens: int) -> int:
    """Bytes on the wire of the keys and values that a rank holds, a key/value head for each that travels."""
    vectors = shape.batch * plan.local_tokens(tokens) * max(shape.kv_heads, plan.grid[0])
    if not quantizes(plan, shape, tokens):
        return vectors * (shape.head_dim + shape.value_dim) * shape.dtype_bytes
    format = parse_format(str(plan.quantized))
    return vectors * (vector_bytes(format, shape.head_dim) + vector_bytes(format, shape.value_dim))

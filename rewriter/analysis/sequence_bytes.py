"""What attention over sequence-sharded tokens sends: the exact bytes of every message of a plan, forward and backward.

They are the bytes that `rewriter.runtime` counts (events of kind "wire"), so that predictions are tested by counting.
A rank receives as many bytes as it sends. Every layer's attention is planned alike; bytes are those of one layer.

Symbols: P ranks as a grid of h heads × r rows × c columns, b sequences, n padded tokens of a rank, Hq query and Hkv
key/value heads, D size of a query or key head, E of a value head, e bytes of an element, s bytes of a log-sum-exp.
Keys and values that travel quantized have the bytes of their vectors instead of D · e and E · e: codes, scales and what
fills up a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rewriter.common.errors import RewriterError
from rewriter.kernels import parse_format, vector_bytes
from rewriter.ops import SequencePlan

Axis = Literal["heads", "row", "column", "plane"]


@dataclass(frozen=True)
class AttentionShape:
    """One attention of a model on one tensor-parallel rank, and how many layers have it.

    Heads are those of the tensor-parallel rank. `dtype_bytes` are those of an element of q, k, v and o (8, 4 or 2);
    `kv_dtype_bytes` those of an element of k and v on the wire, where it is another and the plan names no format;
    gradients travel in the model's own. `window` is the size of a sliding window or chunk. It spares no bytes: cyclic
    tokens of a window lie on all ranks.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    layers: int = 1
    batch: int = 1
    dtype_bytes: int = 2
    kv_dtype_bytes: int | None = None
    causal: bool = True
    window: int | None = None

    @property
    def accumulation_bytes(self) -> int:
        """Bytes of a log-sum-exp and of an element of a running sum: fp32, or fp64 for fp64."""
        return max(4, self.dtype_bytes)

    @property
    def kv_bytes(self) -> int:
        """Bytes of an element of k and v on the wire."""
        return self.dtype_bytes if self.kv_dtype_bytes is None else self.kv_dtype_bytes

    @property
    def groups(self) -> int:
        """Query heads that share a key/value head."""
        return self.q_heads // self.kv_heads


@dataclass(frozen=True)
class WireBytes:
    """Bytes that one rank receives, and sends as many, for one layer."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


@dataclass(frozen=True)
class Message:
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


def travels(plan: SequencePlan) -> str:
    """What the ranks of a plan send each other, in words."""
    heads, rows, columns = plan.grid
    if plan.kind == "ring":
        return "kv go round"
    sent = ["heads exchanged"] if heads > 1 else []
    if columns > 1:
        sent.append(f"q in rows of {columns}")
    if rows > 1:
        sent.append(f"kv in columns of {rows}")
    return ", ".join(sent)


def local_tokens(plan: SequencePlan, tokens: int) -> int:
    """n: the tokens that each rank holds of a sequence of `tokens`, with padding."""
    return max(1, -(-tokens // plan.multiple)) * plan.multiple // plan.ranks


def impossible(plan: SequencePlan, shape: AttentionShape) -> str | None:
    """Why attention of this shape cannot run so, in words; None if it can."""
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
    """Whether the keys and values of `rank` change place before they are gathered (Alg. 1 line 1).

    Rank (i, j) of the plane holds the tokens ≡ i + r · j (mod r · c) and gathers its column from ranks that hold the
    tokens ≡ j + c · i. They are the same on the ends of the grid's diagonal, and everywhere if r or c is 1.
    """
    _, rows, columns = plan.grid
    if plan.kind == "ring":
        return False
    row, column = rank % rows, rank // rows % columns
    return row + rows * column != column + columns * row


def slowest(plan: SequencePlan) -> int:
    """A rank that sends most: one that transposes, where any does."""
    return next((rank for rank in range(plan.grid[1] * plan.grid[2]) if moves(plan, rank)), 0)


def messages(plan: SequencePlan, shape: AttentionShape, tokens: int, rank: int) -> tuple[Message, ...]:
    """Every message of `rank` in one layer, in order, for sequences of `tokens`: forward, then backward.

    Non-overlapping and overlapping plans send the same bytes. Raises RewriterError for a plan that is impossible.
    """
    reason = impossible(plan, shape)
    if reason is not None:
        raise RewriterError(f"{plan}: {reason}")
    if not 0 <= rank < plan.ranks:
        raise RewriterError(f"rank {rank}: {plan} has the ranks 0 to {plan.ranks - 1}")
    local = shape.batch * local_tokens(plan, tokens)
    kv = kv_bytes(plan, shape, tokens)
    found = _ring(plan, shape, local, kv) if plan.kind == "ring" else _grid(plan, shape, local, kv, moves(plan, rank))
    return tuple(m for m in found if m.peers)


def wire_bytes(plan: SequencePlan, shape: AttentionShape, tokens: int, rank: int) -> WireBytes:
    """Bytes that `rank` receives in one layer, forward and backward; exact. Raises RewriterError as `messages` does."""
    found = messages(plan, shape, tokens, rank)
    return WireBytes(
        sum(m.nbytes for m in found if not m.backward),
        sum(m.nbytes for m in found if m.backward),
    )


def quantizes(plan: SequencePlan, shape: AttentionShape, tokens: int) -> bool:
    """Whether keys and values of sequences of `tokens` travel quantized: whether a rank has as many bytes of them."""
    exact = shape.kv_heads * (shape.head_dim + shape.value_dim) * shape.dtype_bytes
    return plan.quantized is not None and shape.batch * local_tokens(plan, tokens) * exact >= plan.min_bytes


def kv_bytes(plan: SequencePlan, shape: AttentionShape, tokens: int) -> int:
    """Bytes on the wire of the keys and values that a rank holds, a key/value head for each that travels."""
    vectors = shape.batch * local_tokens(plan, tokens) * max(shape.kv_heads, plan.grid[0])
    if not quantizes(plan, shape, tokens):
        return vectors * (shape.head_dim + shape.value_dim) * shape.kv_bytes
    format = parse_format(str(plan.quantized))
    return vectors * (vector_bytes(format, shape.head_dim) + vector_bytes(format, shape.value_dim))


def _ring(plan: SequencePlan, shape: AttentionShape, local: int, kv: int) -> list[Message]:
    """Keys and values go round; in backward their gradients follow as running sums, to which the owner adds its own
    part last. Hence P − 1 hops each."""
    hops = plan.ranks - 1
    elements = local * shape.kv_heads * (shape.head_dim + shape.value_dim)
    return [
        Message("kv", "column", hops, hops * kv, False),
        Message("kv", "column", hops, hops * kv, True),
        Message("dkv", "column", hops, hops * elements * shape.accumulation_bytes, True, True),
    ]


def _grid(plan: SequencePlan, shape: AttentionShape, local: int, kv: int, moving: bool) -> list[Message]:
    """Alg. 1 and 3 between an exchange of heads before and after. `local`: b · n; `kv`: bytes of keys and values.

    After the exchange a rank holds h · n tokens of 1/h of the heads, so the elements of a block are those of n tokens
    and all heads; but each rank needs a whole key/value head, hence max(Hkv, h) of them.
    """
    heads, rows, columns = plan.grid
    size, head, value = shape.dtype_bytes, shape.head_dim, shape.value_dim
    query_heads = local * shape.q_heads
    dkv = local * max(shape.kv_heads, heads) * (head + value) * size
    q, o = query_heads * head * size, query_heads * value * size
    lse = query_heads * shape.accumulation_bytes
    swap = int(moving)

    def exchanged(nbytes: int) -> int:
        return nbytes // heads * (heads - 1)  # whole heads, so it divides

    return [
        Message("qkv by heads", "heads", heads - 1, exchanged(q + kv), False),
        Message("kv transposed", "plane", swap, swap * kv, False),
        Message("q in the row", "row", columns - 1, (columns - 1) * q, False),
        Message("kv in the column", "column", rows - 1, (rows - 1) * kv, False),
        Message("o in the row", "row", columns - 1, (columns - 1) * (o + lse), False, True),
        Message("o by heads", "heads", heads - 1, exchanged(o), False, True),
        Message("do by heads", "heads", heads - 1, exchanged(o), True),
        Message("q, o, do in the row", "row", columns - 1, (columns - 1) * (q + 2 * o + lse), True),
        Message("kv in the column", "column", rows - 1, (rows - 1) * kv, True),
        Message("dq in the row", "row", columns - 1, (columns - 1) * q, True, True),
        Message("dkv in the column", "column", rows - 1, (rows - 1) * dkv, True, True),
        Message("dkv transposed", "plane", swap, swap * dkv, True, True),
        Message("dqkv by heads", "heads", heads - 1, exchanged(q + dkv), True, True),
    ]

"""Shape of one attention of a model, and the messages a rank sends for it: the terms that every kind of plan speaks in.

Symbols: P ranks as a grid of h heads × r rows × c columns, b sequences, n padded tokens of a rank, Hq query and Hkv
key/value heads, D size of a query or key head, E of a value head, e bytes of an element, s bytes of a log-sum-exp.
Keys and values that travel quantized have the bytes of their vectors instead of D · e and E · e: codes, scales and what
fills up a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rewriter.ir.attention_mask import visible_pairs
from rewriter.ir.ops import SequencePlan
from rewriter.kernels import parse_format, vector_bytes

Axis = Literal["heads", "row", "column", "plane"]


@dataclass(frozen=True)
class AttentionShape:
    """One attention of a model on one tensor-parallel rank, and how many layers have it.

    Heads are those of the tensor-parallel rank. `dtype_bytes` are those of an element of q, k, v and o (8, 4 or 2);
    `kv_dtype_bytes` those of an element of k and v on the wire, where it is another and the plan names no format;
    gradients travel in the model's own. `window` is the size of a sliding window or chunk. It spares no bytes: cyclic
    tokens of a window are on all ranks.
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
        return vectors * (shape.head_dim + shape.value_dim) * shape.kv_bytes
    format = parse_format(str(plan.quantized))
    return vectors * (vector_bytes(format, shape.head_dim) + vector_bytes(format, shape.value_dim))

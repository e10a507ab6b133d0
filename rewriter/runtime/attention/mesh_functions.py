"""Distributed exact attention as functions of local tensors and a mesh, for code that no compiler has rewritten."""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rewriter.common.errors import RewriterError
from rewriter.ops import MaskSpec, SequenceKind, SequencePlan
from rewriter.runtime.attention.algorithms import register
from rewriter.runtime.attention.mesh import AttentionMesh
from rewriter.runtime.attention.sequence_op import sequence_attention
from rewriter.runtime.compiler_marks import assume_constant_result
from rewriter.runtime.process_groups import MadeOnce
from rewriter.sequence.sequence_plan import KINDS


class AttentionOptions(TypedDict, total=False):
    """Keywords of the functions below.

    causal: a query sees no later key. `window`: nor one that is `window` or more positions before it.
    scale: factor of the scores; 1 / √D if not given.
    length: tokens of the full sequence without padding; P · S if not given. Padding gives 0 and no gradient.
    first_valid: int64 [B]: the first positions of a row are padding too; see `length`. The same on all ranks.
    segment_ids: int64 [B, length]: packed sequences, none of which sees another. The same on all ranks.
    sinks: [H], equal on all ranks: logits that take probability and return nothing. Their gradient on a rank is its
        part: sum it over ranks, as that of any parameter that they all hold.
    quantized: a format as `rewriter.kernels.parse_format` reads it, "int8" or "int4-hadamard@64": keys and values
        travel in it, and all ranks compute with the dequantized ones. Its block should divide D and E: each head's
        vector is filled up to whole blocks.
    """

    causal: bool
    scale: float | None
    length: int | None
    window: int | None
    first_valid: Tensor | None
    segment_ids: Tensor | None
    sinks: Tensor | None
    quantized: str | None


def attention2d(
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSE: Tensor,
    mesh: DeviceMesh,
    *,
    overlap: bool = False,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """Attention2D (arXiv 2503.15758): softmax(scale · q kᵀ) v over the keys of all ranks; o [B, H, S, E] of own tokens.

    q, k and v are those of the S tokens that this rank holds: of P ranks, rank p (its place in the mesh, the last
    dimension fastest) holds the tokens t ≡ p (mod P), as `token_layout.take_tokens(x, dim, "cyclic", p, P)` takes them;
    sequences are padded at the right to a multiple of P. Query head h reads key/value head h // (H / K). Any floating
    dtype; scores, softmax and sums over tiles and ranks are fp32 (fp64 for fp64), what travels is of q's dtype.

    mesh: dimensions "heads", "columns", "rows", of which any may be missing and others may stand around them;
        `rewriter.runtime.sequence_mesh` makes it. The exchange by heads comes first, then queries are gathered within a
        row, keys and values within a column. A mesh of one dimension is a column: keys and values are gathered alone.
    overlap: compute block by block while the next blocks are on their way (Alg. 4 to 11): as many bytes, less waiting.
    options: `AttentionOptions`.

    Differentiable once, and under torch.compile(fullgraph=True). Backward keeps as many tokens as forward was given,
    nothing gathered, and sends and receives on all ranks: all must call it.

    Raises RewriterError, before anything is sent, for heads that do not divide by the grid's, tensors that do not fit
    each other or `length`, a window without causal, and a format that does not exist.
    """
    return _attend("attention2d", "attention2d", q_BHSD, k_BKSD, v_BKSE, mesh, overlap, **options)


def ring_attention(
    q_BHSD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor, mesh: DeviceMesh, **options: Unpack[AttentionOptions]
) -> Tensor:
    """Ring attention (arXiv 2310.01889) in the balanced zigzag layout; o [B, H, S, E] of own tokens.

    Keys and values go round the P ranks of a mesh of one dimension, while each attends over those that it has. Rank p
    holds chunks p and 2P − 1 − p of 2P equal ones, as `token_layout.take_tokens(x, dim, "zigzag", p, P)` takes them;
    sequences are padded at the right to a multiple of 2P. Arguments, gradients and errors are those of `attention2d`.
    """
    return _attend("ring", "ring_attention", q_BHSD, k_BKSD, v_BKSE, mesh, **options)


def ulysses_attention(
    q_BHSD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor, mesh: DeviceMesh, **options: Unpack[AttentionOptions]
) -> Tensor:
    """DeepSpeed Ulysses (arXiv 2309.14509): each of P ranks attends over all tokens with H / P heads; o [B, H, S, E].

    q, k and v travel in one all-to-all on one tensor. P divides H, and either P divides K, or K divides P: key/value
    heads are then repeated on the wire. The mesh has one dimension; layout, arguments, gradients and errors are those
    of `attention2d`.
    """
    return _attend("ulysses", "ulysses_attention", q_BHSD, k_BKSD, v_BKSE, mesh, **options)


def _attend(
    kind: SequenceKind,
    name: str,
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSE: Tensor,
    mesh: DeviceMesh,
    overlap: bool = False,
    *,
    causal: bool = True,
    window: int | None = None,
    quantized: str | None = None,
    **rest: Any,
) -> Tensor:
    key, mask = _key(kind, mesh, overlap, quantized), _mask(name, causal, window)
    return sequence_attention(q_BHSD, k_BKSD, v_BKSE, key, mask=mask, **rest)


@assume_constant_result
def _key(kind: SequenceKind, mesh: DeviceMesh, overlap: bool, quantized: str | None) -> str:
    """The registered key; when compiling, found once while tracing."""
    found = _attention_mesh(mesh)
    sizes = found.heads, found.rows, found.columns
    by_heads = found.ranks, 1, 1
    if sizes == (1, found.ranks, 1) and KINDS[kind].grid(found.ranks) == by_heads:  # one dimension without a name
        found, sizes = found.of_heads(), by_heads
    try:
        plan = SequencePlan(kind, sizes, overlap, quantized)
    except ValueError as error:
        raise RewriterError(f"{kind}: {error}") from None
    return register(plan, found)


@MadeOnce
def _attention_mesh(mesh: DeviceMesh) -> AttentionMesh:
    """Kept, as it takes a millisecond, and eager code asks for it in every layer."""
    return AttentionMesh.of(mesh)


def _mask(name: str, causal: bool, window: int | None) -> MaskSpec:
    if window is None:
        return MaskSpec("causal" if causal else "bidirectional")
    if not causal:
        raise RewriterError(f"{name}: window={window} without causal: only causal windows are offered")
    if window < 1:
        raise RewriterError(f"{name}: window={window}; expected at least 1, the query's own position")
    return MaskSpec("window", window)

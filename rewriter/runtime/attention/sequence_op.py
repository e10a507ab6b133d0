"""Attention over the tokens of all ranks of a sequence axis as operators of torch: `rewriter::sequence_attention` for
full sequences, `rewriter::decode_attention` for tokens that follow them.

Exchange of heads, the plan's algorithm, exchange back; where the plan quantizes keys and values, that comes first. The
operator has a fake and a gradient, so that torch.compile sees one node; it finds its process groups by the key of a
SequenceAxis. Saved for backward are q, k, v, o and lse of as many tokens as a rank holds (after the exchange of heads;
keys and values where Alg. 1, line 1 of arXiv 2503.15758 moves them, quantized if they travel so), and the sinks.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from rewriter.common.errors import RewriterError
from rewriter.ir.ops import MaskSpec
from rewriter.kernels import accumulation_dtype, merge, vector_bytes
from rewriter.runtime.attention import exchanges
from rewriter.runtime.attention.attention_call import AttentionCall, OwnTensors, QuantizedKV
from rewriter.runtime.attention.local import check_kernels, in_autocast_dtype, kernel_forward
from rewriter.runtime.attention.mesh import AttentionMesh
from rewriter.runtime.attention.partial_merge import fold_sinks, sinks_gradient
from rewriter.runtime.attention.sequence_axis import axis_of
from rewriter.runtime.attention.tiles import Visibility
from rewriter.runtime.collectives.exchange import gather_start, messages_under_way


def sequence_attention(
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSE: Tensor,
    key: str,
    *,
    mask: MaskSpec,
    scale: float,
    length: int,
    first_valid: Tensor | None = None,
    segment_ids: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(scale · q kᵀ) v over the keys of all ranks that `mask` shows; o [B, H, S, E] of this rank's tokens.

    q, k and v are those of the S tokens that this rank holds under the plan of the SequenceAxis whose key this is, of
    sequences of `length` tokens, padded at the right to a multiple of the plan's; padding gives 0 and no gradient.
    Query head h reads key/value head h // (H / K). Any floating dtype; scores, softmax and sums over tiles and ranks
    are fp32 (fp64 for fp64), what travels is of q's dtype.

    The same on all ranks: first_valid, int64 [B], the first positions of a row are padding too; segment_ids, int64
    [B, length], packed sequences, none of which sees another; sinks [H], logits that take probability and return
    nothing, whose gradient on a rank is its part of a sum over ranks.

    Differentiable once, and under torch.compile(fullgraph=True). Backward keeps as many tokens as forward was given,
    nothing gathered, and sends and receives on all ranks: all must call it. Raises RewriterError, before anything is
    sent, for a `key` without an axis and for a dtype without a kernel.
    """
    q, k, v = in_autocast_dtype(q_BHSD, k_BKSD, v_BKSE)
    o: Tensor = _forward(q, k, v, first_valid, segment_ids, sinks, key, *astuple(mask), scale, length)[0]
    return o


@torch.library.custom_op("rewriter::sequence_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first_valid: Tensor | None,
    segments: Tensor | None,
    sinks: Tensor | None,
    key: str,
    kind: str,
    size: int | None,
    scale: float,
    length: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(o, lse, then q, k, v, o as backward wants them: empty where they are the operator's own arguments or result)."""
    where = axis_of(key)
    check_kernels(q)
    quantized, nothing = where.quantized(k, v), q.new_empty(0)
    seen = _seen(kind, size, length, first_valid, segments)
    call = AttentionCall(where.mesh, seen, scale, quantized, None if sinks is None else _own_sinks(sinks, where.mesh))
    if quantized is not None:
        k, v = quantized.closed(k, v)
    with messages_under_way("sequence attention"):
        if where.exchanges_heads:
            q, k, v = exchanges.to_heads([q, k, v], where.mesh, "heads.qkv")
            o_kept, lse, k_kept, v_kept = where.algorithm.forward(q, k, v, call)
            (o,) = exchanges.to_tokens([o_kept], where.mesh, "heads.o")
            return o, lse, q, k_kept, v_kept, o_kept
        k = k.contiguous()
        o, lse, k_kept, v_kept = where.algorithm.forward(q.contiguous(), k, v.contiguous(), call)
        if not where.moves_keys and quantized is None:
            k_kept, v_kept = nothing.clone(), nothing.clone()
        elif k_kept is k and quantized is None:  # results must not share memory with arguments
            k_kept, v_kept = k_kept.clone(), v_kept.clone()
        return o, lse, nothing, k_kept, v_kept, nothing.clone()


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    key = rest[3]
    where = axis_of(key)
    check_kernels(q)
    h, (batch, query_heads, tokens, _) = where.mesh.heads, q.shape
    kv_heads = max(k.shape[1] // h, 1)
    o = q.new_empty(batch, query_heads, tokens, v.shape[3])
    lse = q.new_empty(batch, query_heads // h, tokens * h, dtype=accumulation_dtype(q.dtype))
    q_kept = q.new_empty(batch, query_heads // h, tokens * h, q.shape[3])
    k_kept, v_kept = (x.new_empty(batch, kv_heads, tokens * h, x.shape[3]) for x in (k, v))
    if (quantized := where.quantized(k, v)) is not None:
        widths = (vector_bytes(quantized.format, x.shape[3]) for x in (k, v))
        k_kept, v_kept = (k.new_empty(batch, kv_heads, tokens * h, w, dtype=torch.uint8) for w in widths)
    o_kept = q.new_empty(batch, query_heads // h, tokens * h, v.shape[3])
    if not where.exchanges_heads:
        q_kept, o_kept = q.new_empty(0), q.new_empty(0)
        if not where.moves_keys and quantized is None:
            k_kept, v_kept = q.new_empty(0), q.new_empty(0)
    return o, lse, q_kept, k_kept, v_kept, o_kept


@torch.library.custom_op("rewriter::sequence_attention_backward", mutates_args=())
def _backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    first_valid: Tensor | None,
    segments: Tensor | None,
    sinks: Tensor | None,
    key: str,
    kind: str,
    size: int | None,
    scale: float,
    length: int,
    kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dsinks); dsinks is empty without sinks, else this rank's part of the sum."""
    where = axis_of(key)
    quantized = None
    if k.dtype == torch.uint8 and where.format is not None:
        quantized = QuantizedKV(where.format, q.shape[3], do.shape[3], q.dtype)
    call = AttentionCall(where.mesh, _seen(kind, size, length, first_valid, segments), scale, quantized)
    with messages_under_way("sequence attention"):
        (do,) = exchanges.to_heads([do.contiguous()], where.mesh, "heads.do")
        dq, dk, dv = where.algorithm.backward(OwnTensors(do, q, o, lse), (k, v), call)
        dsinks = q.new_empty(0)
        if sinks is not None:
            dsinks = torch.zeros_like(sinks)
            own = _own_sinks(sinks, where.mesh)
            _own_sinks(dsinks, where.mesh).copy_(sinks_gradient(do, o, lse, own))
        if where.exchanges_heads:
            dq, dk, dv = exchanges.to_tokens([dq, dk, dv], where.mesh, "heads.dqkv")
            dk, dv = (exchanges.summed_copies(x, kv_heads) for x in (dk, dv))
        return dq, dk, dv, dsinks


@_backward.register_fake
def _(do: Tensor, q: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sinks, kv_heads = rest[6], rest[-1]
    dk, dv = (q.new_empty(do.shape[0], kv_heads, do.shape[2], x.shape[3]) for x in (q, do))
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return do.new_empty(*do.shape[:3], q.shape[3]), dk, dv, dsinks


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, first_valid, segments, sinks, *ctx.options = inputs
    o, lse, q_kept, k_kept, v_kept, o_kept = output
    where = axis_of(ctx.options[0])
    ctx.kv_heads = k.shape[1]
    if not where.exchanges_heads:
        q_kept, o_kept = q, o
        if not where.moves_keys and where.quantized(k, v) is None:
            k_kept, v_kept = k, v
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q_kept, k_kept, v_kept, o_kept, lse, first_valid, segments, sinks)


def _gradient(ctx: Any, do: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if do is None:
        return (None,) * 11
    saved = ctx.saved_tensors  # once: activation checkpointing gives each only once
    dq, dk, dv, dsinks = _backward(do, *saved, *ctx.options, ctx.kv_heads)
    sinks = saved[-1]
    return dq, dk, dv, None, None, None if sinks is None else dsinks, *(None,) * 5


_forward.register_autograd(_gradient, setup_context=_setup_context)


def _second_gradient(ctx: Any, *_: Any) -> tuple[None, ...]:
    raise RewriterError(
        "sequence attention: its gradient has no gradient of its own. Leave out create_graph, or rewrite without --sp"
    )


_backward.register_autograd(_second_gradient)


def _seen(kind: str, size: int | None, length: int, first_valid: Tensor | None, segments: Tensor | None) -> Visibility:
    return Visibility(MaskSpec(kind, size), length, first_valid, segments)  # type: ignore[arg-type]


def _own_sinks(sinks_H: Tensor, mesh: AttentionMesh) -> Tensor:
    return exchanges.own_heads(sinks_H[None], mesh.head_index, mesh.heads)[0]


# --- new tokens, over keys that are sharded ---


def decode_attention(
    q_BHSD: Tensor,
    k_BKTD: Tensor,
    v_BKTE: Tensor,
    visible: Tensor,
    key: str,
    *,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(scale · q kᵀ) v over the keys of all ranks; o [B, H, S, E] in q's dtype, equal on all of them.

    Each rank attends over its own keys and sends a row of the output and one number per query and head, and no keys;
    the parts are merged by their log-sum-exp. q is that of the new tokens, k and v those that this rank holds; query
    head h reads key/value head h // (H / K). `visible`: boolean [B or 1, 1, S, T]; a rank may see nothing, but each
    query sees a key of some rank. `sinks` [H]: a logit per head that takes probability and returns nothing. Parts
    travel with o in the model's dtype and the log-sum-exp in fp32 (fp64 of fp64), and are merged in the latter. Without
    gradient. Raises RewriterError for a `key` without an axis.
    """
    q, k, v = in_autocast_dtype(q_BHSD, k_BKTD, v_BKTE)
    o: Tensor = _decode(q, k, v, visible, sinks, key, scale)
    return o


@torch.library.custom_op("rewriter::decode_attention", mutates_args=())
def _decode(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, sinks: Tensor | None, key: str, scale: float) -> Tensor:
    batch, heads, queries, _ = q.shape
    groups = heads // k.shape[1]
    # The query heads of a group are rows of one attention, so that K and V are read once and never repeated.
    rows = q.reshape(batch, k.shape[1], groups * queries, -1)
    o, lse = kernel_forward(rows, k, v, visible.repeat(1, 1, groups, 1), False, scale)
    part = o.reshape(batch, heads, queries, -1), lse.reshape(batch, heads, queries)
    o, lse = merge(gather_start(part, axis_of(key).group if key else None, "decode").wait())
    o, _ = fold_sinks(o, lse, sinks)
    return o.to(q.dtype)


@_decode.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, sinks: Tensor | None, key: str, scale: float) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])

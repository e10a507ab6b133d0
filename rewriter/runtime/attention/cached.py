"""Attention over new tokens and the cache. `rewriter.ir.ops.attention` is its specification.

Where tokens are sharded over a sequence axis, this finds the way to keys of other ranks: `sequence_op` for full
sequences, `decode` for tokens after them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rewriter.common.errors import RewriterError
from rewriter.ir.key_blocks import blocks_seen, chosen_of, keys_of_blocks
from rewriter.ir.ops import MaskSpec, at_distance, largest
from rewriter.kernels import accumulation_dtype, decode_attention
from rewriter.runtime.attention.local import in_autocast_dtype
from rewriter.runtime.attention.sequence_op import decode_attention as decode_over_ranks
from rewriter.runtime.attention.sequence_op import sequence_attention
from rewriter.runtime.cache import SequenceCache, StaticCache
from rewriter.runtime.compiled import in_memory
from rewriter.runtime.context import Context, segment_positions


def attention(
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSE: Tensor,
    ctx: Context,
    *,
    slot: int,
    mask: MaskSpec,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    slopes: Tensor | None = None,
    by_distance: Tensor | None = None,
    keys: Tensor | None = None,
    block: int = 1,
    entries: Tensor | None = None,
    key_bias: Tensor | None = None,
    kept: int | None = None,
    stored: bool = False,
) -> Tensor:
    """softmax(scale · q kᵀ + bias) v over the keys that `mask` and `ctx` show; returns o [B, H, S, E] in q's dtype.

    q, k and v are those of the S new tokens; query head h reads key/value head h // (H / K). With `ctx.cache` they
    are stored under `slot` (with `stored`, an earlier layer has done so) and the earlier ones are seen too. `softcap`
    c replaces scores by c · tanh(scores / c); `sinks` [H] adds a logit per head that takes probability and returns
    nothing; `bias` broadcasts to [B, H, S, T], T the keys in view; `slopes` [H] adds slope · (t − s) for a query at s
    and a key at t, `by_distance` [B, H, S, R] its element s − t where it has one; of `keys` int64 [B, S, n], as
    `top_keys` gives them, a query sees no others; with a `block` above 1 they are blocks of so many tokens. `entries`
    [B, K, W, D] are keys and values of such blocks, as `remember_blocks` gives them, which are seen too; `keys` are
    among them then. `key_bias` [B, K, T] is added to the scores of a key in view; with `kept`, a query sees those
    `kept` keys alone for which it is largest. Padding (the first `ctx.first_valid` positions of a row) is never seen,
    except by itself, so that no row is empty and none gives NaN. A token sees those of its own segment, where
    `ctx.segment_ids` has any.

    With `ctx.shards` the S tokens are those that this rank holds, with a SequenceCache after a prompt they are the new
    ones on every rank, and keys of all ranks are seen. Raises RewriterError for a bias that does not fit the keys in
    view, and for biases, chosen keys or softcap where other ranks hold keys.
    """
    if ctx.shards is not None or isinstance(ctx.cache, SequenceCache):
        given: dict[str, Any] = {"softcap": softcap, "choice of keys": keys, "bias of its keys": key_bias}
        given["position bias"] = next((b for b in (bias, slopes, by_distance) if b is not None), None)
        given |= {"key for blocks of tokens": entries, "layer whose keys it reads": stored or None}
        if what := next((name for name, value in given.items() if value is not None), None):
            raise RewriterError(
                f"attention: slot {slot!r} has a {what}, but attention over tokens of several ranks has none. Rewrite "
                "without --sp"
            )
        return _over_ranks(q_BHSD, k_BKSD, v_BKSE, ctx, slot, mask, scale, sinks)
    positions: Tensor | None = None
    if ctx.cache is not None:
        follows = ctx.position is not None and q_BHSD.shape[2] == 1
        options = (bias, slopes, by_distance, keys, entries, key_bias)
        if follows and without_masks(q_BHSD) and all(option is None for option in options):
            return _one_token(q_BHSD, k_BKSD, v_BKSE, ctx, slot, mask, scale, softcap, sinks, stored)
        put = ctx.cache.appended if stored else ctx.cache.append
        k_BKSD, v_BKSE, positions = put(slot, k_BKSD, v_BKSE, ctx.position)
    queries, length = q_BHSD.shape[2], k_BKSD.shape[2]
    if bias is not None and ctx.cache is not None:  # it was computed for the tokens of this call
        raise RewriterError(
            f"attention: slot {slot!r} has a bias for {bias.shape[-1]} keys, but {length} are in view. A position bias "
            "cannot be used with a key/value cache yet: generate without one"
        )
    explicit = softcap is not None or sinks is not None
    chooses = keys is not None or entries is not None
    everything = positions is None and ctx.first_valid is None and ctx.segment_ids is None and not chooses
    if any(each is not None for each in (slopes, by_distance, key_bias)):
        bias = _sum(bias, slopes, by_distance, key_bias, q_BHSD, places(ctx, positions, queries, q_BHSD.device))
    if everything and not explicit and bias is None:
        causal = mask.causal if queries > 1 else False  # a bool where the number is symbolic
        if not causal or mask.unbounded(queries):
            return _sdpa(q_BHSD, k_BKSD, v_BKSE, None, causal, scale)
    plain = not explicit and bias is None and not chooses and ctx.first_valid is None
    if ctx.fills and plain and mask.causal and mask.unbounded(length):
        before = length - queries  # kernels leave out what a causal mask hides where queries are as many as keys
        return _sdpa(F.pad(q_BHSD, (0, 0, before, 0)), k_BKSD, v_BKSE, None, True, scale)[:, :, before:]
    s, t = places(ctx, positions, queries, q_BHSD.device)
    seen = visible(mask, ctx, s, t)
    if chooses:
        first = 0 if ctx.first_valid is None else ctx.first_valid[:, None]
        s, t = (x[None] - first for x in (s, t))
    if entries is not None:
        k_BKSD, v_BKSE = (torch.cat([x, entries.to(x.dtype)], 2) for x in (k_BKSD, v_BKSE))
        of_blocks = blocks_seen(s, entries.shape[2], block).expand(q_BHSD.shape[0], -1, -1)
        of_blocks = of_blocks if keys is None else of_blocks & chosen_of(keys, entries.shape[2])
        seen = torch.cat([seen.expand(len(of_blocks), -1, -1, -1), of_blocks[:, None]], 3)
    elif keys is not None and block > 1:
        seen = seen & keys_of_blocks(keys, s, t, block)[:, None]
    elif keys is not None and keys.shape[2] < length:
        seen = seen & chosen_of(keys, length)[:, None]
    if key_bias is not None and kept is not None and kept < length:
        chosen = largest(key_bias, seen, kept)
        seen = seen & chosen.repeat_interleave(q_BHSD.shape[1] // key_bias.shape[1], 1)
    if explicit:
        return _explicit(q_BHSD, k_BKSD, v_BKSE, seen, scale, softcap, sinks, bias)
    added = seen if bias is None else torch.where(seen, bias.to(q_BHSD.dtype), float("-inf"))
    return _sdpa(q_BHSD, k_BKSD, v_BKSE, added, False, scale)


def store_keys(k_BKSD: Tensor, v_BKSE: Tensor, ctx: Context, *, slot: int) -> None:
    """Store keys and values as `attention` does, and attend to nothing. Raises RewriterError without a cache."""
    if ctx.cache is None:
        raise RewriterError(f"store_keys: slot {slot!r} without a cache to store keys in. Pass one in the context")
    if isinstance(ctx.cache, StaticCache):
        ctx.cache.append(slot, k_BKSD, v_BKSE, ctx.position)
    elif ctx.shards is not None:
        ctx.cache.store_prompt(slot, k_BKSD, v_BKSE, ctx.shards)
    elif ctx.position is not None:
        ctx.cache.append(slot, k_BKSD, v_BKSE, ctx.position)
    else:
        raise _without_axis()


def without_masks(q: Tensor) -> bool:
    """True if one new token like `q` looks at a cache by the kernel that computes from its position what is seen."""
    return q.is_cuda


def _one_token(
    q_BH1D: Tensor,
    k_BK1D: Tensor,
    v_BK1E: Tensor,
    ctx: Context,
    slot: int,
    mask: MaskSpec,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    stored: bool,
) -> Tensor:
    """A new token after others in a StaticCache."""
    cache, position, first_B = ctx.cache, ctx.position, ctx.first_valid
    assert isinstance(cache, StaticCache)
    assert position is not None
    if not stored:
        cache.store_one(slot, k_BK1D, v_BK1E, position)
    keys, values = cache.keys[slot], cache.values[slot]
    if mask.kind == "chunk":  # it begins where padding says
        assert mask.size is not None
        padding_B = position.new_zeros(q_BH1D.shape[0]) if first_B is None else first_B
        first_B = torch.maximum(padding_B, position - (position - padding_B) % mask.size)
    q, keys, values = in_autocast_dtype(q_BH1D, keys, values)
    window = mask.size if mask.kind == "window" else None
    return decode_attention(
        q, keys, values, position, first_B, scale=scale, window=window, softcap=softcap, sinks_H=sinks
    )


def _over_ranks(
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSE: Tensor,
    ctx: Context,
    slot: int,
    mask: MaskSpec,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """Full sequences, of which this rank holds the tokens that `ctx.shards` names; or new tokens on every rank, and
    earlier ones of which each rank holds its own."""
    cache, shards = ctx.cache, ctx.shards
    assert not isinstance(cache, StaticCache), "the model's forward refuses it"
    if shards is not None:
        if cache is not None:
            cache.store_prompt(slot, k_BKSD, v_BKSE, shards)
        rest = {"first_valid": ctx.first_valid, "segment_ids": ctx.segment_ids, "sinks": sinks}
        key, length = shards.axis.key, shards.length
        return sequence_attention(q_BHSD, k_BKSD, v_BKSE, key, mask=mask, scale=scale, length=length, **rest)
    if cache is None or ctx.position is None:
        raise _without_axis()
    k_BKTD, v_BKTE, stored = cache.append(slot, k_BKSD, v_BKSE, ctx.position)
    s = ctx.position + torch.arange(q_BHSD.shape[2], device=q_BHSD.device)
    seen = _stored_visible(mask, ctx, s, stored)
    return decode_over_ranks(q_BHSD, k_BKTD, v_BKTE, seen, cache.axis.key, scale=scale, sinks=sinks)


def _without_axis() -> RewriterError:
    return RewriterError(
        "SequenceCache: a full sequence without a sequence axis. Use it with the model that it was made for, or a "
        "StaticCache"
    )


def places(ctx: Context, positions: Tensor | None, queries: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """int64 [S] and [T]: where queries and keys stand, padding counted; `positions` are the keys', None for the
    queries' own."""
    s = torch.arange(queries, device=device)
    if ctx.position is not None:
        s = s + ctx.position
    return s, s if positions is None else positions


def _sum(
    bias: Tensor | None,
    slopes_H: Tensor | None,
    by_distance_BHSR: Tensor | None,
    key_bias_BKT: Tensor | None,
    q_BHSD: Tensor,
    where: tuple[Tensor, Tensor],
) -> Tensor:
    """The biases that are there in one, [B or 1, H, S or 1, T]; `where` are the `places` of queries and keys, which
    padding and segments shift both alike."""
    (s, t), biases = where, [] if bias is None else [bias]
    if slopes_H is not None:
        biases.append((slopes_H[:, None, None] * (t - s[:, None]))[None])
    if by_distance_BHSR is not None:
        biases.append(at_distance(by_distance_BHSR, s, t))
    if key_bias_BKT is not None:
        biases.append(key_bias_BKT.repeat_interleave(q_BHSD.shape[1] // key_bias_BKT.shape[1], 1)[:, :, None])
    return sum(biases[1:], biases[0])


def visible(mask: MaskSpec, ctx: Context, s: Tensor, t: Tensor) -> Tensor:
    """Boolean [B or 1, 1, S, T]. Computed from position tensors alone, so one compiled graph serves every decode
    step."""
    seen = _stored_visible(mask, ctx, s, t) if ctx.segment_ids is None else _in_segments(mask, ctx, ctx.segment_ids, s)
    return seen | (s[:, None] == t)


def _in_segments(mask: MaskSpec, ctx: Context, segment_ids_BS: Tensor, s: Tensor) -> Tensor:
    """Boolean [B, 1, S, S] of full rows, in which positions count from the start of a segment."""
    places = segment_positions(segment_ids_BS)
    seen = segment_ids_BS[:, :, None] == segment_ids_BS[:, None, :]
    if ctx.first_valid is not None:
        valid = s - ctx.first_valid[:, None]
        places, seen = torch.minimum(places, valid), seen & (valid >= 0)[:, None, :]
    return (seen & mask.visible(places, places))[:, None]


def _stored_visible(mask: MaskSpec, ctx: Context, s: Tensor, t: Tensor) -> Tensor:
    """Boolean [B or 1, 1, S, T] for queries at s [S] and keys at t [T]; what follows the last query is not stored
    yet."""
    stored = (t >= 0) & (t <= s[-1])
    if ctx.first_valid is not None:
        stored = stored & (t >= ctx.first_valid[:, None])
        s, t = s - ctx.first_valid[:, None], t - ctx.first_valid[:, None]
    seen = mask.visible(s, t) & stored[..., None, :]
    return seen[:, None] if seen.dim() == 3 else seen[None, None]


def _sdpa(q_BHSD: Tensor, k_BKTD: Tensor, v_BKTE: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    batch, heads, queries, _ = q_BHSD.shape
    kv_heads = k_BKTD.shape[1]
    grouped = kv_heads != heads
    if queries == 1 and q_BHSD.device.type == "cpu" and torch.compiler.is_compiling() and not torch.is_grad_enabled():
        return _reductions(q_BHSD, k_BKTD, v_BKTE, mask, scale)
    if grouped and queries == 1:
        # One token: the query heads of a group are rows of one attention, so K and V are read once and never
        # repeated.
        q = q_BHSD.reshape(batch, kv_heads, heads // kv_heads, -1)
        if mask is not None and mask.shape[1] == heads:
            mask = mask.reshape(mask.shape[0], kv_heads, heads // kv_heads, -1)
        o = F.scaled_dot_product_attention(q, k_BKTD, v_BKTE, attn_mask=mask, scale=scale)
        return o.reshape(batch, heads, 1, -1)
    if grouped and mask is not None and q_BHSD.is_cuda:
        # With a mask, CUDA's fused kernels do not take fewer KV heads, and the fallback writes all S × T scores to
        # memory.
        k_BKTD, v_BKTE = (x.repeat_interleave(heads // kv_heads, 1) for x in (k_BKTD, v_BKTE))
        grouped = False
    return F.scaled_dot_product_attention(
        q_BHSD, k_BKTD, v_BKTE, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )


def _reductions(q_BH1D: Tensor, k_BKTD: Tensor, v_BKTE: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """One token's attention for TorchInductor on the CPU, to which a kernel of the library is a call that takes longer
    than a short sequence's arithmetic."""
    batch, heads, _, _ = q_BH1D.shape
    kv_heads, groups = k_BKTD.shape[1], heads // k_BKTD.shape[1]
    wide = accumulation_dtype(q_BH1D.dtype)
    q_BKG1D = in_memory(q_BH1D.to(wide) * scale).view(batch, kv_heads, groups, 1, -1)
    scores_BKGT = (q_BKG1D * k_BKTD.to(wide).unsqueeze(2)).sum(-1)
    if mask is not None:
        by_group = mask if mask.shape[1] == 1 else mask.reshape(mask.shape[0], kv_heads, groups, -1)
        scores_BKGT = (
            scores_BKGT.masked_fill(~by_group, float("-inf")) if mask.dtype == torch.bool else scores_BKGT + by_group
        )
    weights_BKGT = in_memory(scores_BKGT.softmax(-1))
    o_BKGE = (weights_BKGT.unsqueeze(-1) * v_BKTE.to(wide).unsqueeze(2)).sum(-2)
    return o_BKGE.reshape(batch, heads, 1, -1).to(q_BH1D.dtype)


def _explicit(
    q_BHSD: Tensor,
    k_BKTD: Tensor,
    v_BKTE: Tensor,
    visible: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Attention that no fused kernel computes, as transformers' eager one does: scores in the model's dtype, softmax in
    fp32."""
    batch, heads, queries, _ = q_BHSD.shape
    kv_heads, keys = k_BKTD.shape[1], k_BKTD.shape[2]
    q = q_BHSD.reshape(batch, kv_heads, heads // kv_heads * queries, -1)
    scores = (q @ k_BKTD.transpose(-1, -2) * scale).view(batch, heads, queries, keys)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, heads, 1, 1).expand(batch, heads, queries, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q_BHSD.dtype)[..., :keys]
    o = weights.reshape(batch, kv_heads, heads // kv_heads * queries, keys) @ v_BKTE
    return o.view(batch, heads, queries, -1)

"""The vocabulary of the IR: what attention, experts and collectives mean, in plain PyTorch.

Each function is the specification of a node of a `Program`: slow, exact, on one device. The runtime implements the same
contracts on many ranks; tests compare the two. `attention_mask` and `sequence_plan` define positions, `recurrences` the
mixers that carry a state.

Shape suffixes: B batch, S query length, T key length, H query heads, K key/value heads, D head size of q and k, E head
size of v, N tokens, X experts, I intermediate size, R distances.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F

from rewriter.ir.activations import ACTIVATIONS as ACTIVATIONS
from rewriter.ir.attention_mask import MaskKind as MaskKind
from rewriter.ir.attention_mask import MaskSpec as MaskSpec
from rewriter.ir.key_blocks import block_starts as block_starts
from rewriter.ir.key_blocks import blocks_seen as blocks_seen
from rewriter.ir.key_blocks import chosen_of as chosen_of
from rewriter.ir.key_blocks import keys_of_blocks as keys_of_blocks
from rewriter.ir.key_blocks import pool_blocks as pool_blocks
from rewriter.ir.key_blocks import remember_blocks as remember_blocks
from rewriter.ir.recurrences import causal_conv as causal_conv
from rewriter.ir.recurrences import delta_rule as delta_rule
from rewriter.ir.recurrences import linear_scan as linear_scan
from rewriter.ir.recurrences import preceded as preceded
from rewriter.ir.recurrences import selective_scan as selective_scan
from rewriter.ir.recurrences import state_space as state_space
from rewriter.ir.sequence_plan import SequenceKind as SequenceKind
from rewriter.ir.sequence_plan import SequencePlan as SequencePlan


def attention(
    q_BHSD: torch.Tensor,
    k_BKTD: torch.Tensor,
    v_BKTE: torch.Tensor,
    ctx: Any,
    *,
    slot: int | str,
    mask: MaskSpec,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    by_distance: torch.Tensor | None = None,
    keys: torch.Tensor | None = None,
    block: int = 1,
    entries: torch.Tensor | None = None,
    key_bias: torch.Tensor | None = None,
    kept: int | None = None,
    sequence: SequencePlan | None = None,
    stored: bool = False,
) -> torch.Tensor:
    """softmax(scale · q kᵀ + bias) v over the keys that `mask` shows, softmax in fp32; returns o_BHSE.

    Query head h reads key/value head h // (H / K). `softcap` c replaces scores by c · tanh(scores / c); `sinks` [H]
    adds one logit per head that takes probability and returns nothing. `slopes` [H] (ALiBi, Press et al. 2022) adds
    slope · (t − s) for a query at s and a key at t, `by_distance` [B, H, S, R] its element d for a key d = s − t
    tokens before, and 0 for d outside 0…R-1. `keys` [B, S, n] are places of the keys, as `top_keys` gives them,
    besides which a query sees none; with a `block` above 1 they are places of blocks of so many tokens, and a query
    sees those behind its last whole block too. `entries` [B, K, W, D] are keys, and values at once, of such blocks, as
    `remember_blocks` gives them, which queries see besides the others; `keys` then choose among them. `key_bias`
    [B, K, T] is added to the scores of a key, by key/value head; with `kept`, a query sees those `kept` keys alone for
    which it is largest, of those that it would see. `ctx` is ignored here: without a cache every call sees all tokens
    from position 0. `slot` names the cache entry of this call; with `stored` that is an earlier call's, which has
    stored k and v there. With `sequence`, q, k and v are those of a rank's tokens and keys of all ranks are seen; here
    all tokens are given, and it changes nothing.
    """
    del ctx, slot, sequence, stored
    if entries is not None:
        k_BKTD, v_BKTE = (torch.cat([x, entries], 2) for x in (k_BKTD, v_BKTE))
    groups = q_BHSD.shape[1] // k_BKTD.shape[1]
    k_BHTD, v_BHTE = k_BKTD.repeat_interleave(groups, 1), v_BKTE.repeat_interleave(groups, 1)
    scores = q_BHSD @ k_BHTD.transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    positions = torch.arange(q_BHSD.shape[2], device=q_BHSD.device)
    if slopes is not None:
        scores = scores + (slopes[:, None, None] * (positions - positions[:, None])).to(scores.dtype)
    if by_distance is not None:
        scores = scores + at_distance(by_distance, positions, positions)
    visible = mask.visible(positions, positions)
    if entries is not None:
        of_blocks = blocks_seen(positions, entries.shape[2], block).expand(q_BHSD.shape[0], -1, -1)
        if keys is not None:
            of_blocks = of_blocks & chosen_of(keys, entries.shape[2])
        visible = torch.cat([visible.expand(*of_blocks.shape[:2], -1), of_blocks], 2)[:, None]
    elif keys is not None:
        chosen = chosen_of(keys, len(positions)) if block == 1 else keys_of_blocks(keys, positions, positions, block)
        visible = visible & chosen[:, None]
    if key_bias is not None:
        scores = scores + key_bias.repeat_interleave(groups, 1)[:, :, None]
        visible = (visible & largest(key_bias, visible, kept)).repeat_interleave(groups, 1)
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q_BHSD.dtype)
    return weights[..., : k_BKTD.shape[2]] @ v_BHTE


def at_distance(by_distance_BHSR: torch.Tensor, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """[B, H, S, T]: for queries at s int64 [S] and keys at t int64 [T], the element of `by_distance` at s − t; 0 where
    it has none."""
    distance_ST = s[:, None] - t
    inside = (distance_ST >= 0) & (distance_ST < by_distance_BHSR.shape[-1])
    index = distance_ST.where(inside, 0).expand(*by_distance_BHSR.shape[:2], -1, -1)
    return by_distance_BHSR.gather(-1, index).masked_fill(~inside, 0)


def largest(key_bias_BKT: torch.Tensor, visible: torch.Tensor, kept: int | None) -> torch.Tensor:
    """Boolean [B, K, S or 1, T]: the `kept` keys (None: all) with the largest biases among those `visible`, a boolean
    [..., S, T] that broadcasts. Where a query sees fewer, some are keys that it does not see."""
    bias_BK1T = key_bias_BKT[:, :, None]
    if kept is None or kept >= key_bias_BKT.shape[-1]:
        return torch.ones_like(bias_BK1T, dtype=torch.bool)
    seen = bias_BK1T.where(visible, torch.finfo(bias_BK1T.dtype).min)
    return torch.zeros_like(seen, dtype=torch.bool).scatter(-1, seen.topk(kept, dim=-1).indices, True)


def remember(x_BSD: torch.Tensor, ctx: Any, *, slot: int | str) -> torch.Tensor:
    """`x` of all tokens so far, [B, T, D], which a cache keeps under `slot`: the keys of an indexer, which chooses what
    attention sees (DeepSeek-V3.2), or what is added to the scores of a key (Doge). Without a cache `x` itself."""
    del ctx, slot
    return x_BSD


def top_keys(scores_BST: torch.Tensor, ctx: Any, *, mask: MaskSpec, count: int, block: int = 1) -> torch.Tensor:
    """The places of the `count` keys with the highest scores that `mask` shows to each query, int64 [B, S, n]; n is the
    number of keys where that is less. Where a query sees fewer than n, some of its n are keys that it does not see.
    With a `block` above 1, scores are those of entries of blocks of so many tokens."""
    del ctx
    positions = torch.arange(scores_BST.shape[1], device=scores_BST.device)
    shown = mask.visible(positions, positions) if block == 1 else blocks_seen(positions, scores_BST.shape[2], block)
    seen = scores_BST.masked_fill(~shown, torch.finfo(scores_BST.dtype).min)
    return seen.topk(min(count, scores_BST.shape[2]), dim=-1).indices


def additive_mask(like: torch.Tensor, ctx: Any = None, *, mask: MaskSpec) -> torch.Tensor:
    """The mask [B, 1, S, S] to add to scores, in the dtype of `like` [B, S, ...]: 0 where seen, else its lowest number.

    It stands where a model computes with its mask itself. Without a cache: with one, `ctx` is refused at run time.
    """
    del ctx
    positions = torch.arange(like.shape[1], device=like.device)
    seen = mask.visible(positions, positions).expand(like.shape[0], 1, -1, -1)
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill(~seen, torch.finfo(like.dtype).min)


ExpertLayout = Literal["concatenated", "interleaved", "ungated"]


def gated(
    h: torch.Tensor,
    *,
    act: str,
    layout: ExpertLayout = "concatenated",
    limit: float | None = None,
    slope: float = 1.0,
    offset: float = 0.0,
) -> torch.Tensor:
    """act(gate) · (up + offset) of an expert's first projection h [..., 2I], or act(h) where it is "ungated".

    `layout` says where gate and up are: in two halves, or in turns. `limit` bounds gate from above and up on both
    sides. `slope` is the factor inside the sigmoid of "silu".
    """
    function = ACTIVATIONS[act] if slope == 1.0 else lambda x: x * torch.sigmoid(slope * x)
    if layout == "ungated":
        return function(h)
    gate, up = h.chunk(2, dim=-1) if layout == "concatenated" else (h[..., ::2], h[..., 1::2])
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return function(gate) * (up + offset if offset else up)


def experts(
    x_NC: torch.Tensor,
    index_NK: torch.Tensor,
    weight_NK: torch.Tensor,
    up_X2IC: torch.Tensor,
    down_XCI: torch.Tensor,
    up_bias_X2I: torch.Tensor | None = None,
    down_bias_XC: torch.Tensor | None = None,
    *,
    transposed: bool = False,
    **gate: Any,
) -> torch.Tensor:
    """Σ_k weight[n, k] · down(gated(up(x))) with expert index[n, k]; `gate` are the options of `gated`.

    `transposed`: projections are [X, in, out]. Indices outside 0…X-1, X being the experts of `down`, add nothing
    (transformers' sentinel for dropped tokens); `up` may have more. Returns [N, C].
    """
    out = torch.zeros_like(x_NC)
    for expert in range(down_XCI.shape[0]):
        token, choice = torch.where(index_NK == expert)
        up, down = (w[expert].T if transposed else w[expert] for w in (up_X2IC, down_XCI))
        up_bias, down_bias = (None if b is None else b[expert] for b in (up_bias_X2I, down_bias_XC))
        y = F.linear(gated(F.linear(x_NC[token], up, up_bias), **gate), down, down_bias)
        out = out.index_add(0, token, (y * weight_NK[token, choice, None]).to(out.dtype))
    return out


def store_keys(k_BKSD: torch.Tensor, v_BKSE: torch.Tensor, ctx: Any, slot: int = 0) -> None:
    """Stands for an `attention` whose result nobody needs: it only stores its keys and values."""


def type_as_model(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`x` in the model's dtype: the one of `like`, an input or parameter of the same body."""
    return x.to(like.dtype)


def dropout(x: torch.Tensor, p: float) -> torch.Tensor:
    """The identity: a Program computes in eval mode. Kept so that an adapted checkpoint trains as its source does."""
    del p
    return x


def where_rewired(rewired_BS: torch.Tensor, rewired: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """`rewired` [B, S, ...] at tokens that are rewired, `exact` at the others: see `rewriter.ir.phases`."""
    return torch.where(rewired_BS[..., None], rewired, exact)


# --- collectives on a named mesh axis. On one device each is the identity; `simulate` gives them their meaning ---


def all_reduce(x: torch.Tensor, axis: str, *, format: str | None = None, min_bytes: int = 0) -> torch.Tensor:
    """Sum over the ranks of `axis`; its gradient is the identity.

    With a `format` of `rewriter.kernels`, of an `x` of `min_bytes` bytes or more: the flat tensor is padded with zeros
    and cut into a slice per rank, equal and of whole blocks. The owner of a slice adds its own part, as it is, to the
    parts of the others, dequantized; the sum, in fp32, is quantized again, and what that dequantizes to is every rank's
    result.
    """
    return x


def all_reduce_start(x: torch.Tensor, axis: str, *, format: str | None = None, min_bytes: int = 0) -> torch.Tensor:
    """Begin `all_reduce` in place on the partial `x`; only `all_reduce_wait` may use the result."""
    return x


def all_reduce_wait(pending: torch.Tensor) -> torch.Tensor:
    """The sum that `all_reduce_start` began."""
    return pending


def copy_to_group(x: torch.Tensor, axis: str) -> torch.Tensor:
    """The identity; its gradient is an all-reduce. Stands where a replicated value enters rank-local computation."""
    return x


def agreed(x: torch.Tensor, axis: str) -> torch.Tensor:
    """`x` that every rank computed alike, as one value of all; its gradient is an equal part on each rank.

    Follows a module whose input was copied to the group because it has values of each rank's own as well.
    """
    return x


def all_gather(x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
    """Shards concatenated along `dim`; its gradient is the rank's own slice."""
    return x


def repeat_shard(x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
    """A rank's own shard in place of every other's: `all_gather` without communication, for timing only."""
    return x


def own_shard(x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
    """A rank's own equal run of the replicated `x` along `dim`."""
    return x


def own_ranges(x: torch.Tensor, axis: str, dim: int, ranges: tuple[tuple[tuple[int, int], ...], ...]) -> torch.Tensor:
    """A rank's own parts of the replicated constant `x` along `dim`: per rank, (begin, end) of each, in order."""
    return x


def shard_tokens(x: torch.Tensor, axis: str, plan: SequencePlan) -> torch.Tensor:
    """A rank's own tokens of `x` [B, S, ...], padded at the right with zeros to `plan.multiple`."""
    return x


def gather_tokens(x: torch.Tensor, axis: str, plan: SequencePlan) -> torch.Tensor:
    """All tokens of `x` [B, n, ...] in their order, without padding; its gradient is the rank's own tokens'."""
    return x


def vocab_embedding(ids: torch.Tensor, weight: torch.Tensor, axis: str, padding_idx: int = -1) -> torch.Tensor:
    """Rows of a vocabulary-sharded table; ids of other ranks give zeros, so the result is Partial over `axis`. The row
    of `padding_idx`, -1 for none, has no gradient."""
    return F.embedding(ids, weight, padding_idx if padding_idx >= 0 else None)


COLLECTIVES = frozenset({all_reduce, all_reduce_start, all_gather})
# what carries a state from token to token, and what keeps anything between calls: each has a `slot`
RECURRENT = frozenset({causal_conv, preceded, delta_rule, state_space, selective_scan, linear_scan})
STATEFUL = RECURRENT | {pool_blocks}
CACHED = STATEFUL | {attention, remember, remember_blocks}

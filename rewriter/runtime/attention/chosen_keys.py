"""Keys that an indexer keeps and chooses: `rewriter.ir.ops.remember` and `top_keys` are the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from rewriter.common.errors import RewriterError
from rewriter.ir.key_blocks import blocks_seen
from rewriter.ir.ops import MaskSpec
from rewriter.runtime.attention.cached import places, visible
from rewriter.runtime.attention.key_blocks import row_start
from rewriter.runtime.cache import StaticCache
from rewriter.runtime.context import Context


def remember(x_BSD: Tensor, ctx: Context, *, slot: int) -> Tensor:
    """`x` of all tokens that attention looks at in this call, [B, T, D]: with a cache, which keeps it under `slot`,
    those of earlier ones too. Raises RewriterError where other ranks hold tokens."""
    if ctx.shards is not None or not isinstance(ctx.cache, StaticCache | None):
        raise RewriterError(
            f"remember: slot {slot} holds what chooses the keys of attention, and has to see all tokens, which are "
            "sharded over ranks. Rewrite without --sp"
        )
    if ctx.cache is None:
        return x_BSD
    nothing = x_BSD.new_empty(x_BSD.shape[0], 1, x_BSD.shape[1], 0)
    kept_B1TD, _, _ = ctx.cache.append(slot, x_BSD[:, None], nothing, ctx.position)
    return kept_B1TD[:, 0].to(x_BSD.dtype)


def top_keys(scores_BST: Tensor, ctx: Context, *, mask: MaskSpec, count: int, block: int = 1) -> Tensor:
    """The places of the `count` keys in view with the highest scores that `mask` and `ctx` show, int64 [B, S, n]; with
    a `block` above 1, of entries of blocks of so many tokens, in the order of the row."""
    batch, queries, keys = scores_BST.shape
    lowest = torch.finfo(scores_BST.dtype).min
    if block > 1:
        own_BS = row_start(ctx, batch, scores_BST.device)[:, None] + torch.arange(queries, device=scores_BST.device)
        shown = blocks_seen(own_BS, keys, block)
        return scores_BST.masked_fill(~shown, lowest).topk(min(count, keys), dim=-1).indices
    stored = None if ctx.position is None else torch.arange(keys, device=scores_BST.device)
    s, t = places(ctx, stored, queries, scores_BST.device)
    seen = visible(mask, ctx, s, t)[:, 0]
    return scores_BST.masked_fill(~seen, lowest).topk(min(count, keys), dim=-1).indices

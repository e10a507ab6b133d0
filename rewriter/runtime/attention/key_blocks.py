"""Keys that stand for blocks of tokens: `rewriter.ir.key_blocks` is the specification.

Rows of a batch begin at their first valid token, so that the same call may touch other blocks in each of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rewriter.ir.key_blocks import Pooling, blocks_touched, pooled
from rewriter.runtime.cache import StaticCache
from rewriter.runtime.context import Context
from rewriter.runtime.mixers.state import state_after, state_before


def row_start(ctx: Context, batch: int, device: torch.device) -> Tensor:
    """int64 [B]: the place in its row of a call's first token; negative on padding."""
    start = torch.zeros(batch, dtype=torch.int64, device=device)
    if ctx.position is not None:
        start = start + ctx.position
    return start if ctx.first_valid is None else start - ctx.first_valid


def _first_block(ctx: Context, x: Tensor, size: int) -> Tensor:
    """int64 [B]: the number in its row of the first block that the tokens of a call touch."""
    return row_start(ctx, x.shape[0], x.device).clamp(min=0) // size


def pool_blocks(
    x_BSC: Tensor,
    gate_BSC: Tensor | None,
    bias_NC: Tensor | None,
    ctx: Context,
    *,
    slot: int,
    size: int,
    pooling: Pooling,
    overlap: bool = False,
) -> Tensor:
    """One vector for each block of `size` tokens that the tokens touch, [B, W, C] (C / 2 with `overlap`).

    State: the size − 1 tokens before (2 · size − 1 with `overlap`), x and gate beside each other, in the cache's dtype.
    """
    before_BLC = state_before(ctx, slot, "pool_blocks")
    given = x_BSC if gate_BSC is None else torch.cat([x_BSC, gate_BSC.to(x_BSC.dtype)], -1)
    batch, tokens, channels = x_BSC.shape
    kept = 2 * size - 1 if overlap else size - 1
    whole = F.pad(given, (0, 0, kept, 0)) if before_BLC is None else torch.cat([before_BLC.to(given.dtype), given], 1)
    start_B = row_start(ctx, batch, x_BSC.device)
    first_B = start_B.clamp(min=0) // size * size
    offset = torch.arange(blocks_touched(tokens, size) * size, device=x_BSC.device)

    def taken(back: int) -> tuple[Tensor, Tensor]:
        """(the tokens [B, W, size, ...] of blocks, those `back` tokens earlier; which of them are there)."""
        place = first_B[:, None] + offset - back
        index = (place - start_B[:, None] + kept).clamp(0, whole.shape[1] - 1)
        there = (place >= 0) & (place < start_B[:, None] + tokens)
        found = whole.gather(1, index[..., None].expand(-1, -1, whole.shape[2]))
        return found.unflatten(1, (-1, size)), there.view(batch, -1, size, 1)

    own, there = taken(0)
    if gate_BSC is None or bias_NC is None:
        out = pooled(own, None, there, pooling)
    else:
        x, gate = own[..., :channels], own[..., channels:] + bias_NC
        if overlap:
            half = channels // 2
            earlier, there_before = taken(size)
            x = torch.cat([earlier[..., :half], x[..., half:]], 2)
            gate = torch.cat([earlier[..., channels : channels + half] + bias_NC[:, :half], gate[..., half:]], 2)
            there = torch.cat([there_before, there], 2)
        out = pooled(x, gate, there, pooling)
    state_after(ctx, slot, whole[:, whole.shape[1] - kept :], out)
    return out


def block_starts(x_BSD: Tensor, ctx: Context, *, size: int) -> Tensor:
    """int64 [B, W]: the place in its row of the first token of each block that the tokens of `x` touch."""
    count = blocks_touched(x_BSD.shape[1], size)
    return (_first_block(ctx, x_BSD, size)[:, None] + torch.arange(count, device=x_BSD.device)) * size


def remember_blocks(x_BWD: Tensor, ctx: Context, *, slot: int, size: int) -> Tensor:
    """`x` of all blocks so far, [B, T, D]: with a cache, which keeps it under `slot`, those of earlier calls too."""
    if ctx.cache is None:
        return x_BWD
    assert isinstance(ctx.cache, StaticCache), "pool_blocks refuses tokens of several ranks"
    first_B = _first_block(ctx, x_BWD, size)
    kept_BTD = ctx.cache.store_entries(slot, x_BWD, first_B)
    return x_BWD if ctx.position is None else kept_BTD.to(x_BWD.dtype)

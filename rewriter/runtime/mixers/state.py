"""A mixer's reading of a context: the state that a call begins from and leaves behind, and which tokens are padding."""

from __future__ import annotations

import torch
from torch import Tensor

from rewriter.common.errors import RewriterError
from rewriter.runtime.cache import StaticCache
from rewriter.runtime.context import Context


def state_before(ctx: Context, slot: int, name: str) -> Tensor | None:
    """The state [B, ...] of earlier tokens, memory that `state_after` writes; None for zeros.

    Raises RewriterError for a context whose tokens do not follow each other on this rank.
    """
    if ctx.shards is not None:
        raise RewriterError(
            f"{name}: slot {slot} carries a state from token to token: its tokens cannot be sharded over ranks. "
            "Rewrite without --sp"
        )
    if ctx.segment_ids is not None:
        raise RewriterError(
            f"Context: segment_ids with {name}, slot {slot}, whose state would cross from sequence to sequence. Pass "
            "one sequence per row and pad at the left"
        )
    return None if ctx.position is None else _cache(ctx).state(slot)


def state_after(ctx: Context, slot: int, state: Tensor, out: Tensor) -> None:
    """Keep `state`, where there is a cache. Raises RewriterError where `out`, the result, requires a gradient."""
    if ctx.cache is not None:
        _cache(ctx).store_state(slot, state, out)


def _cache(ctx: Context) -> StaticCache:
    assert isinstance(ctx.cache, StaticCache), "a SequenceCache refuses states"
    return ctx.cache


def without_padding(x: Tensor, ctx: Context, tokens: int) -> Tensor:
    """`x`, whose dimension `tokens` is that of new tokens, with 0 at padding."""
    if ctx.first_valid is None:
        return x
    place = torch.arange(x.shape[tokens], device=x.device)
    if ctx.position is not None:
        place = place + ctx.position
    shape = [1] * x.dim()
    shape[0], shape[tokens] = x.shape[0], x.shape[tokens]
    return x.masked_fill((place < ctx.first_valid[:, None]).view(shape), 0)

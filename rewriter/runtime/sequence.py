"""A tensor of full sequences to one of a rank's own tokens, and back.

Users pass full sequences. Inside a model every rank holds its own tokens, and only attention looks at those of others:

    function        forward                                  gradient
    shard_tokens    a rank's own tokens of a full tensor     its own tokens' (the full one is input, equal everywhere)
    gather_tokens   the full tensor from all ranks' tokens   the rank's own tokens'
    last_tokens     the last tokens on every rank            none: refused

That of gather_tokens is right where what follows is replicated and has no parameters: every rank then holds the full
gradient already. What a parameter gets is the part of a rank's own tokens, to be summed over the ranks: see
`rewriter.training`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rewriter.common.errors import RewriterError
from rewriter.runtime.context import Context
from rewriter.runtime.exchange import gather_start
from rewriter.runtime.sequence_axis import Shards
from rewriter.runtime.with_gradient import with_gradient
from rewriter.sequence.token_layout import join_tokens, take_tokens


def shard_tokens(x: Tensor, ctx: Context, fill: float = 0) -> Tensor:
    """This rank's own tokens [B, count, ...] of the full `x` [B, S, ...], padded with `fill`.

    `x` itself where tokens are not sharded. Raises RewriterError if S is not the length of the context's sequences.
    """
    shards = ctx.shards
    if shards is None:
        return x
    if x.shape[1] != shards.length:
        raise RewriterError(
            f"shard_tokens: shape {list(x.shape)} has {x.shape[1]} tokens, expected the {shards.length} of input_ids. "
            "Every rank passes full sequences"
        )
    return _own_tokens(x, shards, fill)


def _own_tokens(x: Tensor, shards: Shards, fill: float = 0) -> Tensor:
    return take_tokens(x, 1, shards.axis.plan.layout, shards.axis.rank, shards.axis.ranks, fill)


def gather_tokens(x: Tensor, ctx: Context) -> Tensor:
    """The full tensor [B, S, ...], without padding, of every rank's own tokens `x` [B, count, ...].

    `x` itself where tokens are not sharded.
    """
    shards = ctx.shards
    if shards is None:
        return x
    _check_count(x, shards, "gather_tokens")

    def joined(x: Tensor) -> Tensor:
        parts = [part for (part,) in gather_start([x], shards.axis.group, "tokens").wait()]
        return join_tokens(parts, 1, shards.axis.plan.layout, shards.length)

    return with_gradient(x, joined, lambda gradient: _own_tokens(gradient, shards))


def _no_gradient(gradient: Tensor) -> Tensor:
    raise RewriterError(
        "logits_to_keep: no gradient where tokens are sharded, since each rank computes the same last logits, "
        "and the head's gradient would be counted once per rank. Leave it out, or pass labels"
    )


def last_tokens(x: Tensor, n: int, ctx: Context) -> Tensor:
    """The last n tokens [B, n, ...] of every row on every rank, of the tokens `x` that a rank holds; 0 keeps `x`.

    Padding is never among them. Fewer where the sequences have fewer. A backward pass through it raises RewriterError.
    """
    shards = ctx.shards
    if n == 0 or shards is None:
        return x[:, -n:]
    _check_count(x, shards, "last_tokens")
    axis, count = shards.axis, shards.count
    places = torch.cat([shards.indices_of(rank, x.device) for rank in range(axis.ranks)])
    where = torch.argsort(places)[max(0, shards.length - n) : shards.length]  # rank · count + local index
    owner = where // count
    # every rank sends n rows, of which only its own are read
    rows = x.index_select(1, torch.where(owner == axis.rank, where % count, 0))

    def of_owners(rows: Tensor) -> Tensor:
        parts = torch.stack([part for (part,) in gather_start([rows], axis.group, "last tokens").wait()])
        return parts[owner, :, torch.arange(len(owner), device=x.device)].transpose(0, 1).contiguous()

    return with_gradient(rows, of_owners, _no_gradient)


def _check_count(x: Tensor, shards: Shards, name: str) -> None:
    if x.shape[1] != shards.count:
        raise RewriterError(
            f"{name}: shape {list(x.shape)} has {x.shape[1]} tokens, expected {shards.count}: those that a rank of "
            f"{shards.axis.ranks} holds of {shards.length}"
        )

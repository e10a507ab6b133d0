"""Context of a forward pass besides its tokens, and the tokens of full sequences that this rank holds.

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

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rewriter.common.errors import RewriterError
from rewriter.ir.phases import PromptPhase
from rewriter.ir.sequence_plan import join_tokens, take_tokens
from rewriter.runtime.attention.sequence_axis import Shards
from rewriter.runtime.cache import SequenceCache, StaticCache
from rewriter.runtime.collectives.exchange import gather_start
from rewriter.runtime.collectives.gradients import with_gradient
from rewriter.runtime.torch_marks import register_node


@dataclass(frozen=True)
class Context:
    """Passed explicitly to every layer; `Context()` is right for training and scoring of unpadded rows.

    cache: keys, values and states of earlier calls, or None (then every call sees its own tokens only).
    position: int64 scalar tensor, the place of the first new token in the cache; None means that nothing came before,
        which is what prefill and training say, and what lets attention take its fast paths; states begin from zeros.
        A tensor, never an int: a compiled decode step must not be compiled again for every token.
    first_valid: int64 [B], the number of padding tokens at the left of each row; None means that there are none.
    segment_ids: int64 [B, S], packed sequences: a token sees those of its own segment, a run of equal ids. For whole
        rows, without a cache.
    rewired: of a model whose passes rewire tokens of the prompt alone, which tokens are rewired: bool [B, S] or [1, S],
        or True or False for all. None: without `position` rows are prompts (with `segment_ids`, each segment is one),
        and tokens that follow others are exact. The model's forward reads it and hands layers None.
    fills: `cache` ends with the new tokens, which are at least half of it: their number tells what each of them sees.
    shards: how tokens are sharded over a sequence axis while a model computes; None where each rank holds them all.
        The model's forward sets it. Everything else here is of full sequences, and equal on all ranks of the axis.
    """

    cache: StaticCache | SequenceCache | None = None
    position: Tensor | None = None
    first_valid: Tensor | None = None
    segment_ids: Tensor | None = None
    shards: Shards | None = None
    rewired: Tensor | bool | None = None
    fills: bool = False

    def __post_init__(self) -> None:
        if self.segment_ids is not None and self.cache is not None:
            raise RewriterError(
                "Context: segment_ids (packed sequences) with a cache: tokens to come belong to one sequence. Pass one "
                "sequence per row and pad at the left"
            )
        if self.position is not None and self.cache is None:
            raise RewriterError("Context: position is given without a cache. Pass both, or neither for full sequences")

    def bound(self, slots: Sequence[int]) -> Context:
        """The same context with a cache of the entries `slots` alone: see `StaticCache.bound`."""
        return self if self.cache is None else replace(self, cache=self.cache.bound(slots))


def positions(length: int, first_valid: Tensor | None, batch: int, device: torch.device) -> Tensor:
    """int64 [B, S]: 0 at a row's first valid token and, as in transformers, 0 on its padding."""
    index = torch.arange(length, device=device).expand(batch, length)
    return index if first_valid is None else (index - first_valid[:, None]).clamp(min=0)


def segment_positions(segment_ids_BS: Tensor) -> Tensor:
    """int64 [B, S]: each token's place in its segment, a run of equal ids."""
    index = torch.arange(segment_ids_BS.shape[1], device=segment_ids_BS.device)
    begins = torch.ones_like(segment_ids_BS, dtype=torch.bool)
    begins[:, 1:] = segment_ids_BS[:, 1:] != segment_ids_BS[:, :-1]
    return index - torch.where(begins, index, 0).cummax(1).values


def rewired_by_default(phase: PromptPhase, shape: torch.Size, ctx: Context, device: torch.device) -> Tensor | bool:
    """The tokens that `phase` rewires in a call of `shape` [B, S] that does not say: bool [B or 1, S], or False."""
    if ctx.position is not None:
        return False
    if ctx.segment_ids is None:
        padding = ctx.first_valid
        return phase.rewired(shape[1], padding).to(device).expand(1 if padding is None else shape[0], shape[1])
    place = segment_positions(ctx.segment_ids)
    to_end = segment_positions(ctx.segment_ids.flip(1)).flip(1)
    if ctx.first_valid is not None:
        place = torch.minimum(place, torch.arange(shape[1], device=device) - ctx.first_valid[:, None])
    return (place >= phase.exact_head) & (to_end >= phase.exact_tail)


register_node(Context, ("cache", "position", "first_valid", "segment_ids", "rewired"), ("fills", "shards"))


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


_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, as int64: neighbouring places get weights that look random
_PIECE = 1 << 22  # elements at a time: places take 8 bytes each


@torch.no_grad()
def check_agreement(group: ProcessGroup | None, device: torch.device, **inputs: Tensor | None) -> None:
    """Raises RewriterError on every rank of `group` unless all were given equal `inputs`, naming the first that differ.

    Ranks compare shapes and a sum of all values with weights by place: a few numbers, which the host reads. Left out
    while torch.compile traces.
    """
    if group is None or torch.compiler.is_compiling():
        return
    own = torch.stack([_digest(x, device) for x in inputs.values()])
    every = torch.stack([part for (part,) in gather_start([own], group, "agreement").wait()]).cpu()
    same = (every == every[0]).all(-1)  # [ranks, inputs]
    if bool(same.all()):
        return
    index = int((~same).any(0).nonzero()[0])
    other = int((~same[:, index]).nonzero()[0])
    what = " and ".join(_described(every[rank, index].tolist()) for rank in (0, other))
    raise RewriterError(
        f"{list(inputs)[index]} differ between ranks 0 and {other} of {group.size()} that share sequences: {what}. "
        "Pass the same full rows on all of them: give rows to the replicas of the mesh's dimension dp, not to all "
        "processes"
    )


def _digest(x: Tensor | None, device: torch.device) -> Tensor:
    """int64 [4]: dimensions (−1 without a tensor), the first and the second of them, the sum of weighted values."""
    if x is None:
        return torch.tensor([-1, 0, 0, 0], device=device)
    sizes = [x.dim(), *x.shape[:2], *[1] * max(0, 2 - x.dim())]
    return torch.cat([torch.tensor(sizes, device=device), checksum(x).to(device)[None]])


def checksum(x: Tensor) -> Tensor:
    """Checksum of the bits of x, with weights by place: an int64 without dimensions."""
    bits = x.reshape(-1).view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, len(bits), _PIECE):
        piece = bits[start : start + _PIECE].long()
        places = torch.arange(start + 1, start + 1 + len(piece), device=x.device) * _FACTOR
        total += (piece * (places ^ (places >> 29))).sum()
    return total


def _described(digest: list[int]) -> str:
    dimensions, *sizes, total = digest
    return "None" if dimensions < 0 else f"shape {sizes[:dimensions]} with check sum {total & 0xFFFFFFFF:08x}"

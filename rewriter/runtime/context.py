"""What a forward pass must know besides its tokens: where they stand, and what came before."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rewriter.common.errors import RewriterError
from rewriter.runtime.attention.sequence_axis import Shards
from rewriter.runtime.cache import SequenceCache, StaticCache
from rewriter.runtime.torch_marks import register_node


@dataclass(frozen=True)
class Context:
    """Passed explicitly to every layer; `Context()` is right for training and scoring of unpadded rows.

    cache: keys and values of earlier calls, or None (then every call sees its own tokens only).
    position: int64 scalar tensor, the place of the first new token in the cache; None means that nothing came before,
        which is what prefill and training say, and what lets attention take its fast paths. A tensor, never an int: a
        compiled decode step must not be compiled again for every token.
    first_valid: int64 [B], the number of padding tokens at the left of each row; None means that there are none.
    segment_ids: int64 [B, S], packed sequences: a token sees those of its own segment, a run of equal ids. For whole
        rows, without a cache.
    shards: how tokens are sharded over a sequence axis while a model computes; None where each rank holds them all.
        The model's forward sets it. Everything else here is of full sequences, and equal on all ranks of the axis.
    """

    cache: StaticCache | SequenceCache | None = None
    position: Tensor | None = None
    first_valid: Tensor | None = None
    segment_ids: Tensor | None = None
    shards: Shards | None = None

    def __post_init__(self) -> None:
        if self.segment_ids is not None and self.cache is not None:
            raise RewriterError(
                "Context: segment_ids (packed sequences) with a cache: tokens to come belong to one sequence. Pass one "
                "sequence per row and pad at the left"
            )
        if self.position is not None and self.cache is None:
            raise RewriterError("Context: position is given without a cache. Pass both, or neither for full sequences")

    def bound(self, slot: int) -> Context:
        """The same context with a cache of the one entry `slot`: see `StaticCache.bound`."""
        return self if self.cache is None else replace(self, cache=self.cache.bound(slot))


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


register_node(Context, ("cache", "position", "first_valid", "segment_ids"), ("shards",))

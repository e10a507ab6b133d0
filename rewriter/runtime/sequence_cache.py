"""Keys and values of earlier tokens, each on the rank of a sequence axis that holds the token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rewriter.common.errors import RewriterError
from rewriter.runtime.cache import SlotSpec
from rewriter.runtime.sequence_axis import SequenceAxis, Shards

NEVER = torch.iinfo(torch.int64).max  # a position that no query reaches


class SequenceCache:
    """K [B, kv_heads, room + 1, head_dim_k] and V likewise for every slot, for about max_length / ranks tokens.

    A prompt's tokens stay where prefill had them: in a rank's order, padding included. The j-th token after the prompt
    goes to rank j modulo the ranks, behind those, so that ranks stay within one token of each other in any layout.
    Where a rank writes a token that is not its own is the last index, which is never read. A slot with a window keeps
    all of a rank's tokens, and the mask leaves out what is too old.

    places: int64 [room + 1], the position of what is or will be at each index; NEVER for padding and the last index.
    prompt: int64 [2], tokens of the prompt and of a rank's share of it with its padding.
    """

    def __init__(
        self,
        slots: Sequence[SlotSpec],
        axis: SequenceAxis,
        batch: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        # The most that a rank has, whatever part of max_length is the prompt: its share of up to multiple − 1 tokens of
        # padding at the prompt, and of up to ranks − 1 where the ranks before it are one token ahead.
        room = (max_length + axis.plan.multiple + axis.ranks - 2) // axis.ranks

        def empty(spec: SlotSpec, head_dim: int) -> Tensor:
            # Zeros, because a masked weight of 0 times an uninitialised NaN is NaN.
            return torch.zeros(batch, spec.kv_heads, room + 1, head_dim, dtype=dtype, device=device)

        self.keys = [empty(spec, spec.head_dim_k) for spec in slots]
        self.values = [empty(spec, spec.head_dim_v) for spec in slots]
        self.places = torch.empty(room + 1, dtype=torch.int64, device=device)
        self.prompt = torch.empty(2, dtype=torch.int64, device=device)
        self.axis, self.max_length, self.only_slot = axis, max_length, False
        self._begin(None)

    def bound(self, slot: int) -> SequenceCache:
        """The same memory, seen as the one entry that any slot number names: see `StaticCache.bound`."""
        if self.only_slot:
            return self
        parts = [self.keys[slot]], [self.values[slot]], self.places, self.prompt
        return _unflatten(parts, (self.axis, self.max_length, True))

    def store_prompt(self, slot: int, k_BKSD: Tensor, v_BKSE: Tensor, shards: Shards) -> None:
        """Store the keys and values of this rank's own tokens of a prompt, in place of all that was stored.

        Raises RewriterError for keys that require a gradient, and for a prompt longer than max_length.
        """
        _refuse_gradients(k_BKSD, v_BKSE)
        if shards.length > self.max_length:
            raise self._too_long(shards.length)
        entry, count = 0 if self.only_slot else slot, k_BKSD.shape[2]
        self.keys[entry][:, :, :count] = k_BKSD.to(self.keys[entry].dtype)
        self.values[entry][:, :, :count] = v_BKSE.to(self.values[entry].dtype)
        self._begin(shards)

    def append(self, slot: int, k_BKSD: Tensor, v_BKSE: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Store those of the S tokens from `position` (int64 scalar) on that are this rank's; every rank passes all.

        Returns all keys [B, K, T, D] and values [B, K, T, E] of the rank, and their positions int64 [T]; those above
        the new tokens' are not stored yet. Raises RewriterError for keys that require a gradient, and, where positions
        are on the CPU, for tokens from max_length on (elsewhere torch's index error).
        """
        _refuse_gradients(k_BKSD, v_BKSE)
        entry, new = 0 if self.only_slot else slot, k_BKSD.shape[2]
        keys, values, end = self.keys[entry], self.values[entry], len(self.places) - 1
        host = position.device.type == "cpu" and not torch.compiler.is_compiling()
        if host and int(position) + new > self.max_length:
            raise self._too_long(int(position) + new)
        token = position + torch.arange(new, device=keys.device)
        behind = token - self.prompt[0]
        own = behind % self.axis.ranks == self.axis.rank
        index = torch.where(own, self.prompt[1] + behind // self.axis.ranks, end)
        index = torch.where(token < self.max_length, index, end + 1)  # no index of the memory
        keys.index_copy_(2, index, k_BKSD.to(keys.dtype))
        values.index_copy_(2, index, v_BKSE.to(values.dtype))
        return keys, values, self.places

    def _begin(self, shards: Shards | None) -> None:
        """Set `places` and `prompt` for a prompt, or for none."""
        ranks, rank, room = self.axis.ranks, self.axis.rank, len(self.places) - 1
        own = torch.empty(0, dtype=torch.int64) if shards is None else shards.indices
        length, count = (0, 0) if shards is None else (shards.length, len(own))
        own = torch.where(own < length, own, NEVER)
        later = length + rank + ranks * torch.arange(room - count)
        self.places.copy_(torch.cat([own, later, torch.tensor([NEVER])]))
        self.prompt.copy_(torch.tensor([length, count]))

    def _too_long(self, length: int) -> RewriterError:
        return RewriterError(f"SequenceCache: {length} tokens, but it was made for max_length={self.max_length}")


def _refuse_gradients(k: Tensor, v: Tensor) -> None:
    if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
        raise RewriterError(
            "SequenceCache: its keys require a gradient. Use a cache under torch.no_grad(), and Context() without one "
            "to train"
        )


def _flatten(cache: SequenceCache) -> tuple[list[Any], tuple[SequenceAxis, int, bool]]:
    return [cache.keys, cache.values, cache.places, cache.prompt], (cache.axis, cache.max_length, cache.only_slot)


def _unflatten(parts: Any, context: tuple[SequenceAxis, int, bool]) -> SequenceCache:
    cache = SequenceCache.__new__(SequenceCache)
    cache.keys, cache.values, cache.places, cache.prompt = parts
    cache.axis, cache.max_length, cache.only_slot = context
    return cache


pytree.register_pytree_node(SequenceCache, _flatten, _unflatten, serialized_type_name="rewriter.runtime.SequenceCache")

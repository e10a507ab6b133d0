"""Keys and values of earlier tokens, in memory allocated once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rewriter.common.errors import RewriterError


@dataclass(frozen=True)
class SlotSpec:
    """One attention call's entry on this rank. Head sizes of keys and values may differ.

    `window` w says that no query of this slot sees a key w or more positions back; only the last w are kept then.
    """

    kv_heads: int
    head_dim_k: int
    head_dim_v: int
    window: int | None = None


class StaticCache:
    """K [B, kv_heads, length, head_dim_k] and V likewise for every slot. Positions count left padding.

    The length is max_length, and position t is at index t; a slot with a window w keeps min(w, max_length) positions
    as a ring, t at index t modulo the length.
    """

    def __init__(
        self,
        slots: Sequence[SlotSpec],
        batch: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        def empty(spec: SlotSpec, head_dim: int) -> Tensor:
            length = max_length if spec.window is None else min(spec.window, max_length)
            # Zeros, because a masked weight of 0 times an uninitialised NaN is NaN.
            return torch.zeros(batch, spec.kv_heads, length, head_dim, dtype=dtype, device=device)

        self.keys = [empty(spec, spec.head_dim_k) for spec in slots]
        self.values = [empty(spec, spec.head_dim_v) for spec in slots]
        self.rings = [spec.window is not None for spec in slots]
        self.only_slot = False

    def bound(self, slot: int) -> StaticCache:
        """The same memory, seen as the one entry that any slot number names.

        A compiled segment is shared by all layers of a class. It must not read its layer's slot number, a constant
        that would have it compiled again for each layer, so it is handed its own entry.
        """
        if self.only_slot:
            return self
        return _from_parts([self.keys[slot]], [self.values[slot]], [self.rings[slot]], True)

    def append(
        self, slot: int, k_BKSD: Tensor, v_BKSE: Tensor, position: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Store S new keys and values from `position` (int64 scalar, None: the cache is empty) on.

        Returns what the S queries look at: keys [B, K, T, D], values [B, K, T, E] and the keys' positions int64 [T],
        negative where nothing is stored yet. On an empty cache these are the new ones themselves, with None for 0 …
        S-1. Writing past max_length is torch's index error; `generate` allocates enough. Raises RewriterError for
        keys that require a gradient, and on an empty cache for more tokens than fit.
        """
        if torch.is_grad_enabled() and (k_BKSD.requires_grad or v_BKSE.requires_grad):
            raise RewriterError(
                "StaticCache: its keys require a gradient. Use a cache under torch.no_grad(), and Context() "
                "without one to train"
            )
        entry = 0 if self.only_slot else slot
        keys, values, ring = self.keys[entry], self.values[entry], self.rings[entry]
        new, length = k_BKSD.shape[2], keys.shape[2]
        if position is None:
            if not ring and new > length:
                raise RewriterError(f"StaticCache: {new} tokens, but it was made for max_length={length}")
            kept = min(new, length)  # of a long prompt, a ring keeps the end
            index = torch.arange(new - kept, new, device=keys.device) % length
            keys.index_copy_(2, index, k_BKSD[:, :, new - kept :].to(keys.dtype))
            values.index_copy_(2, index, v_BKSE[:, :, new - kept :].to(values.dtype))
            return k_BKSD, v_BKSE, None
        index = position + torch.arange(new, device=keys.device)
        if not ring:
            keys.index_copy_(2, index, k_BKSD.to(keys.dtype))
            values.index_copy_(2, index, v_BKSE.to(values.dtype))
            return keys, values, torch.arange(length, device=keys.device)
        # Several new tokens may overwrite what the first of them still sees, so look at old and new side by side.
        seen = torch.cat([keys, k_BKSD.to(keys.dtype)], 2), torch.cat([values, v_BKSE.to(values.dtype)], 2)
        last = position - 1
        stored = last - (last - torch.arange(length, device=keys.device)) % length
        kept = min(new, length)
        keys.index_copy_(2, index[new - kept :] % length, k_BKSD[:, :, new - kept :].to(keys.dtype))
        values.index_copy_(2, index[new - kept :] % length, v_BKSE[:, :, new - kept :].to(values.dtype))
        return *seen, torch.cat([stored, index])


def _from_parts(keys: list[Tensor], values: list[Tensor], rings: list[bool], only_slot: bool) -> StaticCache:
    cache = StaticCache.__new__(StaticCache)
    cache.keys, cache.values, cache.rings, cache.only_slot = keys, values, rings, only_slot
    return cache


def _flatten(cache: StaticCache) -> tuple[list[Any], tuple[list[bool], bool]]:
    return [cache.keys, cache.values], (cache.rings, cache.only_slot)


def _unflatten(parts: Any, context: tuple[list[bool], bool]) -> StaticCache:
    keys, values = parts
    return _from_parts(keys, values, *context)


pytree.register_pytree_node(StaticCache, _flatten, _unflatten, serialized_type_name="rewriter.runtime.StaticCache")

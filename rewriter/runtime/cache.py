"""Keys and values of earlier tokens, and states that follow from them, in memory allocated once: all of them on each
rank, or each on the rank of a sequence axis that holds the token."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from rewriter.common.errors import RewriterError
from rewriter.common.numbers import size
from rewriter.kernels import accumulation_dtype
from rewriter.runtime.attention.sequence_axis import SequenceAxis, Shards
from rewriter.runtime.torch_marks import register_node

NEVER = torch.iinfo(torch.int64).max  # a position that no query reaches


@dataclass(frozen=True)
class SlotSpec:
    """One attention call's entry on this rank. Head sizes of keys and values may differ.

    `window` w says that no query of this slot sees a key w or more positions back; only the last w are kept then.
    `tokens`: an entry stands for a block of so many.
    """

    kv_heads: int
    head_dim_k: int
    head_dim_v: int
    window: int | None = None
    tokens: int = 1


@dataclass(frozen=True)
class StateSpec:
    """State that one call of a recurrent or convolutional mixer keeps from token to token: [batch, *shape] on this
    rank.

    `fp32`: a state that sums are made in, of the dtype that those of the cache's are; else it is of the cache's dtype.
    """

    shape: tuple[int, ...]
    fp32: bool


class _SlotMemory:
    """K [B, kv_heads, length, head_dim_k] and V likewise for every slot; `lengths` are the slots'. Of a slot with a
    state, K is the state and V has no elements."""

    def __init__(
        self,
        slots: Sequence[SlotSpec | StateSpec],
        lengths: Sequence[int],
        batch: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        def zeros(spec: SlotSpec | StateSpec, length: int, of_keys: bool) -> Tensor:
            if isinstance(spec, StateSpec):
                shape = (batch, *spec.shape) if of_keys else (0,)
                return torch.zeros(shape, dtype=accumulation_dtype(dtype) if spec.fp32 else dtype, device=device)
            width = spec.head_dim_k if of_keys else spec.head_dim_v
            return torch.zeros(batch, spec.kv_heads, length, width, dtype=dtype, device=device)

        # Zeros, because a masked weight of 0 times an uninitialised NaN is NaN.
        try:
            self.keys, self.values = (
                [zeros(spec, length, of_keys) for spec, length in zip(slots, lengths, strict=True)]
                for of_keys in (True, False)
            )
        except RuntimeError as error:  # torch.OutOfMemoryError, and what the CPU's allocator raises
            growing = [s for s in slots if isinstance(s, SlotSpec)]
            per_token = sum(s.kv_heads * (s.head_dim_k + s.head_dim_v) for s in growing) * dtype.itemsize * batch
            raise RewriterError(
                f"A cache of {max(lengths):,} tokens does not fit into the memory of {device}: a token takes "
                f"{size(per_token)}. Generate fewer tokens, or for fewer prompts at once."
            ) from error

    @property
    def states(self) -> list[Tensor]:
        """The states of mixers, by slot."""
        return [keys for keys, values in zip(self.keys, self.values, strict=True) if values.dim() == 1]

    def clear(self) -> None:
        """Zeros everywhere, as when it was made: what was not finite would show even where it is masked."""
        for memory in (*self.keys, *self.values):
            memory.zero_()

    def bound(self, slots: Sequence[int]) -> Self:
        """The same memory with the entries `slots` alone, which count from 0.

        A compiled segment is shared by all layers of a class. It must not see its layer's slot numbers, constants that
        would have it compiled again for each layer, so it is handed its own entries.
        """
        one = copy(self)
        one.keys, one.values = ([memories[slot] for slot in slots] for memories in (self.keys, self.values))
        return one

    def _write(self, slot: int, index: Tensor, k: Tensor, v: Tensor) -> None:
        """Store the last tokens of k and v, as many as `index` has, at its places."""
        for memory, new in ((self.keys[slot], k), (self.values[slot], v)):
            memory.index_copy_(2, index, new[:, :, new.shape[2] - len(index) :].to(memory.dtype))

    def _refuse_gradients(self, name: str, *stored: Tensor) -> None:
        if torch.is_grad_enabled() and any(x.requires_grad for x in stored):
            raise RewriterError(
                f"{type(self).__name__}: its {name} require a gradient. Use a cache under torch.no_grad(), and "
                "Context() without one to train"
            )


def _length(positions: int, block: int) -> int:
    """Entries of as many positions, each of a block of tokens: of blocks, those that a call may touch behind them
    too."""
    return positions if block == 1 else positions // block + 2


class StaticCache(_SlotMemory):
    """Position t, left padding counted, is at index t of max_length; a slot with a window w below max_length keeps w
    positions as a ring, t at index t modulo w. `fixed`: slots whose size does not depend on max_length, which are rings
    and states."""

    def __init__(
        self,
        slots: Sequence[SlotSpec | StateSpec],
        batch: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.blocks = [spec.tokens if isinstance(spec, SlotSpec) else 1 for spec in slots]
        windows = [spec.window if isinstance(spec, SlotSpec) else None for spec in slots]
        rings = [window is not None and window < max_length for window in windows]
        lengths = [
            window if ring and window is not None else _length(max_length, block)
            for window, ring, block in zip(windows, rings, self.blocks, strict=True)
        ]
        self.fixed = [ring or isinstance(spec, StateSpec) for ring, spec in zip(rings, slots, strict=True)]
        super().__init__(slots, lengths, batch, dtype, device)

    def state(self, slot: int) -> Tensor:
        """[B, *shape] after the last token: its memory, which `store_state` writes."""
        return self.keys[slot]

    def store_state(self, slot: int, state: Tensor, out: Tensor) -> None:
        """Raises RewriterError where `out`, computed with it, requires a gradient, which would end at the state."""
        self._refuse_gradients("states", out)
        self.keys[slot].copy_(state)

    def first(self, length: int) -> Self:
        """The same memory as far as positions below `length` need it: less to look at. States are as they are."""
        one = copy(self)
        one.keys, one.values = (
            [
                m if fixed else m[:, :, : _length(length, block)]
                for m, fixed, block in zip(memories, self.fixed, self.blocks, strict=True)
            ]
            for memories in (self.keys, self.values)
        )
        return one

    def bound(self, slots: Sequence[int]) -> Self:
        one = super().bound(slots)
        one.fixed = [self.fixed[slot] for slot in slots]
        one.blocks = [self.blocks[slot] for slot in slots]
        return one

    def store_entries(self, slot: int, x_BWD: Tensor, first_B: Tensor) -> Tensor:
        """Store entries of blocks, of each row from its number `first` (int64 [B]) on; returns all of them [B, T, D].

        Raises RewriterError for entries that require a gradient.
        """
        self._refuse_gradients("keys", x_BWD)
        kept_BTD = self.keys[slot][:, 0]
        index = (first_B[:, None] + torch.arange(x_BWD.shape[1], device=x_BWD.device))[..., None].expand_as(x_BWD)
        kept_BTD.scatter_(1, index, x_BWD.to(kept_BTD.dtype))
        return kept_BTD

    def store_one(self, slot: int, k_BK1D: Tensor, v_BK1E: Tensor, position: Tensor) -> None:
        """Store the key and value at `position` p (int64 scalar), at index p modulo T of the slot's keys [B, K, T, D].

        Raises RewriterError for keys that require a gradient.
        """
        self._refuse_gradients("keys", k_BK1D, v_BK1E)
        index = position % self.keys[slot].shape[2] if self.fixed[slot] else position
        self._write(slot, index.reshape(1), k_BK1D, v_BK1E)

    def appended(
        self, slot: int, k_BKSD: Tensor, v_BKSE: Tensor, position: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The result of `append` once these keys and values are stored, also for a layer that reads another one's. The
        slot is no ring, of which new tokens overwrite what the first of them sees."""
        if position is None:
            return k_BKSD, v_BKSE, None
        keys = self.keys[slot]
        return keys, self.values[slot], torch.arange(keys.shape[2], device=keys.device)

    def append(
        self, slot: int, k_BKSD: Tensor, v_BKSE: Tensor, position: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Store S new keys and values from `position` (int64 scalar, None: the cache is empty) on.

        Returns what the S queries look at: keys [B, K, T, D], values [B, K, T, E] and the keys' positions int64 [T],
        negative where nothing is stored yet. On an empty cache these are the new ones themselves, with None for 0 …
        S-1. Writing past max_length is torch's index error; `generate` allocates enough. Raises RewriterError for
        keys that require a gradient, and on an empty cache for more tokens than fit.
        """
        self._refuse_gradients("keys", k_BKSD, v_BKSE)
        keys, values, ring = self.keys[slot], self.values[slot], self.fixed[slot]
        new, length = k_BKSD.shape[2], keys.shape[2]
        if position is None:
            if not ring and new > length:
                raise RewriterError(f"StaticCache: {new} tokens, but it was made for max_length={length}")
            kept = min(new, length)  # of a long prompt, a ring keeps the end
            self._write(slot, torch.arange(new - kept, new, device=keys.device) % length, k_BKSD, v_BKSE)
            return self.appended(slot, k_BKSD, v_BKSE, position)
        index = position.reshape(1) if new == 1 else position + torch.arange(new, device=keys.device)
        if not ring:
            self._write(slot, index, k_BKSD, v_BKSE)
            return self.appended(slot, k_BKSD, v_BKSE, position)
        # Several new tokens may overwrite what the first of them still sees, so look at old and new side by side.
        seen = torch.cat([keys, k_BKSD.to(keys.dtype)], 2), torch.cat([values, v_BKSE.to(values.dtype)], 2)
        last = position - 1
        stored = last - (last - torch.arange(length, device=keys.device)) % length
        self._write(slot, index[new - min(new, length) :] % length, k_BKSD, v_BKSE)
        return *seen, torch.cat([stored, index])


class SequenceCache(_SlotMemory):
    """All slots have the length room + 1, for about max_length / ranks tokens.

    A prompt's tokens stay where prefill had them: in a rank's order, padding included. The j-th token after the prompt
    goes to rank j modulo the ranks, after those, so that ranks stay within one token of each other in any layout.
    Where a rank writes a token that is not its own is the last index, which is never read. A slot with a window keeps
    all of a rank's tokens, and the mask leaves out what is too old.

    places: int64 [room + 1], the position of what is or will be at each index; NEVER for padding and the last index.
    prompt: int64 [2], tokens of the prompt and of a rank's share of it with its padding.
    """

    def __init__(
        self,
        slots: Sequence[SlotSpec | StateSpec],
        axis: SequenceAxis,
        batch: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        if states := [slot for slot, spec in enumerate(slots) if isinstance(spec, StateSpec)]:
            raise RewriterError(
                f"SequenceCache: slot {states[0]} is a state that goes from token to token: its tokens cannot be "
                "sharded over ranks. Rewrite without --sp"
            )
        # The most that a rank has, for any length of the prompt: its share of up to multiple − 1 tokens of padding at
        # the prompt, and of up to ranks − 1 where the ranks before it are one token ahead.
        room = (max_length + axis.plan.multiple + axis.ranks - 2) // axis.ranks
        super().__init__(slots, [room + 1] * len(slots), batch, dtype, device)
        self.places = torch.empty(room + 1, dtype=torch.int64, device=device)
        self.prompt = torch.empty(2, dtype=torch.int64, device=device)
        self.axis, self.max_length = axis, max_length
        self._begin(None)

    def store_prompt(self, slot: int, k_BKSD: Tensor, v_BKSE: Tensor, shards: Shards) -> None:
        """Store the keys and values of this rank's own tokens of a prompt, in place of all that was stored.

        Raises RewriterError for keys that require a gradient, and for a prompt longer than max_length.
        """
        self._refuse_gradients("keys", k_BKSD, v_BKSE)
        if shards.length > self.max_length:
            raise self._too_long(shards.length)
        count = k_BKSD.shape[2]
        self.keys[slot][:, :, :count] = k_BKSD.to(self.keys[slot].dtype)
        self.values[slot][:, :, :count] = v_BKSE.to(self.values[slot].dtype)
        self._begin(shards)

    def append(self, slot: int, k_BKSD: Tensor, v_BKSE: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Store those of the S tokens from `position` (int64 scalar) on that are this rank's; every rank passes all.

        Returns all keys [B, K, T, D] and values [B, K, T, E] of the rank, and their positions int64 [T]; those above
        the new tokens' are not stored yet. Raises RewriterError for keys that require a gradient, and, where positions
        are on the CPU, for tokens from max_length on (elsewhere torch's index error).
        """
        self._refuse_gradients("keys", k_BKSD, v_BKSE)
        new = k_BKSD.shape[2]
        keys, values, end = self.keys[slot], self.values[slot], len(self.places) - 1
        host = position.device.type == "cpu" and not torch.compiler.is_compiling()
        if host and int(position) + new > self.max_length:
            raise self._too_long(int(position) + new)
        token = position + torch.arange(new, device=keys.device)
        after = token - self.prompt[0]
        own = after % self.axis.ranks == self.axis.rank
        index = torch.where(own, self.prompt[1] + after // self.axis.ranks, end)
        index = torch.where(token < self.max_length, index, end + 1)  # no index of the memory
        self._write(slot, index, k_BKSD, v_BKSE)
        return keys, values, self.places

    def _begin(self, shards: Shards | None) -> None:
        """Set `places` and `prompt` for a prompt, or for none."""
        ranks, rank, room = self.axis.ranks, self.axis.rank, len(self.places) - 1
        length, count = (0, 0) if shards is None else (shards.length, shards.count)
        if shards is not None:
            own = shards.indices_of(rank, self.places.device)
            self.places[:count] = torch.where(own < length, own, NEVER)
        later = torch.arange(room - count, device=self.places.device)
        self.places[count:room] = length + rank + ranks * later
        self.places[room:].fill_(NEVER)
        self.prompt[0].fill_(length)
        self.prompt[1].fill_(count)

    def _too_long(self, length: int) -> RewriterError:
        return RewriterError(f"SequenceCache: {length} tokens, but it was made for max_length={self.max_length}")


def make_cache(model: nn.Module, batch: int, max_length: int, like: Tensor) -> StaticCache | SequenceCache:
    """An empty cache for `batch` rows of an emitted model, in dtype and on the device of `like`.

    Raises RewriterError for a model that does not say what it caches.
    """
    slots: Any = getattr(model, "slots", None)
    if not slots:
        raise RewriterError(
            f"generate: {type(model).__name__} names no cache slots. Rewrite the model with this version, or pass "
            "use_cache=False"
        )
    axis: SequenceAxis | None = getattr(model, "sequence", None)
    if axis is not None and axis.ranks > 1:
        return SequenceCache(slots, axis, batch, max_length, like.dtype, like.device)
    return StaticCache(slots, batch, max_length, like.dtype, like.device)


register_node(StaticCache, ("keys", "values"), ("fixed", "blocks"))
register_node(SequenceCache, ("keys", "values", "places", "prompt"), ("axis", "max_length"))

"""An independent reference for late reads in models whose stream is of any form: one batch holds copies of the stream.

Nothing here follows the stream, and nothing of the analyses or the passes is used: it is told which modules' results
each block adds (`BlockEnds`), and which layers are rewired. The model runs on its input once for every write that some
block misses, all in one batch. Copy 0 is the model itself. In the copy of block b, what b adds is withheld: zero, or
(own-partial ladder) this rank's own part of it. A block that reads late is computed from the copy whose withheld write
it misses, and its result is given to all copies but its own. All else (norms, factors, mixtures of streams, what a
layer hands on) is the unmodified code of the model, which treats the rows of a batch one by one.

Ranks are threads, each with a copy of the model that holds its part of the exit projections (`exit_shares`).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rewriter.check.exit_shares import exit_shares, set_tensor
from rewriter.check.per_rank_reference import Group, LayerMode
from rewriter.common.errors import RewriterError


@dataclass(frozen=True)
class BlockEnds:
    """A block of the source, by paths of modules: `sums` give what ranks sum, and `tails` (norms) stand between them
    and the stream. `local`: every rank computes all of it. `mixes`: modules of the source compute what it carries on of
    the stream, or scales by."""

    layer: int
    sums: tuple[str, ...]
    tails: tuple[str, ...] = ()
    local: bool = False
    mixes: bool = False


class WithheldReference:
    """The model of `mix` (layer number → mode: standard, ladder or own_partial) as a function of token ids.

    `exact` is the mix of tokens that are exact where a call says which are rewired; by default all standard. `whole`
    are paths of modules that every rank computes in full. Raises RewriterError for a mode that no copy can stand for.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        blocks: Sequence[BlockEnds],
        mix: Mapping[int, LayerMode],
        ranks: int,
        *,
        exact: Mapping[int, LayerMode] | None = None,
        whole: Collection[str] = (),
    ) -> None:
        self.model, self.blocks, self.ranks, self.whole = model, blocks, ranks, whole
        self.wirings = [_missed(blocks, m) for m in (mix, exact or {})]
        missed = sorted({read for wiring in self.wirings for read in wiring if read is not None})
        self.copies = {read: 1 + i for i, read in enumerate(missed)}
        own = {index for w in self.wirings for index, read in enumerate(w) if read is not None and read[1]}
        self.parted = own | {block for block, of_rank in missed if of_rank}

    def __call__(self, input_ids: torch.Tensor, rewired: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        """Logits [B, S, vocabulary] for `input_ids` [B, S] (int64); `kwargs` as for the model. No cache is used.

        `rewired`, bool [B, S], is False at tokens that the unmodified model computes; by default all are rewired.
        """
        count, rows = 1 + len(self.copies), input_ids.shape[0]

        def repeated(x: Any) -> Any:
            batch = isinstance(x, torch.Tensor) and x.ndim > 0 and x.shape[0] == rows
            return x.repeat(count, *[1] * (x.ndim - 1)) if batch else x

        group = Group(self.ranks)

        def run(rank: int) -> torch.Tensor:
            twin = self._twin(rank)
            for index, block in enumerate(self.blocks):
                for path in (*block.sums, *block.tails):
                    hook = _Hook(self, index, path in block.tails, group, rank, rewired, count * rows)
                    twin.get_submodule(path).register_forward_hook(hook, with_kwargs=True)
            given = {name: repeated(x) for name, x in kwargs.items()}
            logits: torch.Tensor = twin(input_ids=repeated(input_ids), use_cache=False, **given).logits
            return logits[:rows]

        results = group.run(run)
        if any(not torch.equal(result, results[0]) for result in results):
            raise RewriterError("withheld reference: the ranks end with different logits")
        return results[0]

    def _twin(self, rank: int) -> PreTrainedModel:
        """A copy of the model that shares its parameters, and holds this rank's part of the sums that are parted."""
        twin = copy.deepcopy(self.model, {id(p): p for p in self.model.parameters()})
        for index in sorted(self.parted):
            if self.ranks > 1 and not (found := self._shares(index)):
                raise RewriterError(f"withheld reference: no exit projection is in {self.blocks[index].sums}")
            for module, share in found if self.ranks > 1 else ():
                full = getattr(module, share.weight)
                set_tensor(twin, f"{share.path}.{share.weight}", share.of_weight(full, rank, self.ranks))
                if share.bias is not None:
                    set_tensor(twin, f"{share.path}.{share.bias}", getattr(module, share.bias) / self.ranks)
        return twin

    def _shares(self, index: int) -> list[tuple[nn.Module, Any]]:
        hidden = self.model.config.get_text_config().hidden_size
        found = []
        for path in self.blocks[index].sums:
            for name, module in self.model.get_submodule(path).named_modules():
                full = f"{path}.{name}".removesuffix(".")
                if not any(full == w or full.startswith(f"{w}.") for w in self.whole):
                    found += [(module, share) for share in exit_shares(full, module, hidden)]
        return found


class _Hook:
    """After a module whose result a block adds: the result for every copy."""

    def __init__(
        self,
        reference: WithheldReference,
        block: int,
        is_tail: bool,
        group: Group,
        rank: int,
        rewired: torch.Tensor | None,
        rows: int,
    ) -> None:
        self.reference, self.block, self.is_tail, self.rows = reference, block, is_tail, rows
        self.group, self.rank, self.rewired = group, rank, rewired

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        for shared in (value for value in (*args, *kwargs.values()) if isinstance(value, MutableMapping)):
            for key, values in list(shared.items()):  # keys and values that later layers read
                if isinstance(values, tuple) and all(x.shape[0] == self.rows for x in values):
                    shared[key] = tuple(self._of(x, False) for x in values)
        if isinstance(output, torch.Tensor):
            return self._of(output, True)
        results, first = [], True
        for item in output:
            is_result = first and isinstance(item, torch.Tensor) and item.is_floating_point()
            results.append(self._of(item, is_result) if isinstance(item, torch.Tensor) else item)
            first = first and not is_result
        return type(output)(results)

    def _of(self, output: torch.Tensor, is_result: bool) -> torch.Tensor:
        of, index = self.reference, self.block
        count = 1 + len(of.copies)
        copies = list(output.chunk(count, 0))
        nothing, own = (of.copies.get((index, kind)) for kind in (False, True))
        if not self.is_tail:
            value = self._read(copies)
            total = value
            if is_result and index in of.parted and of.ranks > 1:
                total = self.group.all_reduce(self.rank, value)
            copies = [total] * count
            if own is not None and is_result:
                copies[own] = value
        if nothing is not None and is_result:
            copies[nothing] = torch.zeros_like(copies[0])
        return torch.cat(copies)

    def _read(self, copies: Sequence[torch.Tensor]) -> torch.Tensor:
        """The result of the copy that the block reads, at each token by the wiring of that token."""
        places = (wiring[self.block] for wiring in self.reference.wirings)
        value, exact = (copies[0 if read is None else self.reference.copies[read]] for read in places)
        if self.rewired is None:
            return value
        mask = self.rewired.reshape(*self.rewired.shape, *[1] * (value.ndim - 2))
        return torch.where(mask if value.shape[:2] == self.rewired.shape else mask.flatten(0, 1), value, exact)


def _mode(mix: Mapping[int, LayerMode], block: BlockEnds) -> str:
    return mix.get(block.layer, LayerMode()).mode


def _missed(blocks: Sequence[BlockEnds], mix: Mapping[int, LayerMode]) -> list[tuple[int, bool] | None]:
    """By block, the one whose write it misses (the last before it that ranks share), where it reads late, and whether
    it reads this rank's own part of that: what every rank computes in full does not."""
    missed: list[tuple[int, bool] | None] = []
    for index, block in enumerate(blocks):
        mode, found = _mode(mix, block), None
        if mode not in ("standard", "ladder", "own_partial"):
            raise RewriterError(f"withheld reference: layer {block.layer} is {mode}, which no copy can stand for")
        if mode != "standard":
            for before in range(index - 1, -1, -1):
                if _mode(mix, blocks[before]) not in (mode, "standard"):
                    break
                if not blocks[before].local:
                    found = before, mode == "own_partial" and not block.local
                    break
        missed.append(found)
    return missed

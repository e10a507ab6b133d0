"""An independent reference for late reads in models whose stream is of any form: one batch holds copies of the stream.

Nothing here follows the stream, and nothing of the analyses or the passes is used: it is told which modules' results
each block adds (`BlockEnds`), and which layers are rewired. The model runs on its input once for every write that some
block misses, all in one batch. Copy 0 is the model itself. In the copy of block b, what b adds is withheld: zero, or
(own-partial ladder) this rank's own part of it. A block that reads late is computed from the copy whose withheld write
it misses, and its result is given to all copies but its own. Where its coefficients are late as well, all copies are
given those of that copy. Where tokens of the prompt alone are rewired, a write is withheld at these tokens, and copies
hold the exact stream at the others. All else (norms, factors, mixtures of streams, what a layer hands on) is the
unmodified code of the model, which treats the rows of a batch one by one.

Ranks are threads, each with a copy of the model that holds its part of the exit projections (`exit_shares`).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
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
    the stream, or scales by. `coefficients`: by path, those of them whose results it multiplies by, and the places of
    these where others of its results are the stream on its way (none: all are coefficients); None where the model's own
    code between modules computes some."""

    layer: int
    sums: tuple[str, ...]
    tails: tuple[str, ...] = ()
    local: bool = False
    mixes: bool = False
    coefficients: Mapping[str, tuple[int, ...]] | None = field(default_factory=dict)


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
        self.mixed_late = [[_mixes_late(block, m) for block in blocks] for m in (mix, exact or {})]
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
                if any(late[index] for late in self.mixed_late):
                    for path, places in (block.coefficients or {}).items():
                        mixing = _CoefficientHook(self, index, places, rewired)
                        twin.get_submodule(path).register_forward_hook(mixing)
            given = {name: repeated(x) for name, x in kwargs.items()}
            logits: torch.Tensor = twin(input_ids=repeated(input_ids), use_cache=False, **given).logits
            return logits[:rows]

        results = group.run(run)
        if any(not torch.equal(result, results[0]) for result in results):
            raise RewriterError("withheld reference: the ranks end with different logits")
        return results[0]

    def read_in(self, wiring: Sequence[tuple[int, bool] | None]) -> set[int]:
        """The copies that blocks of a wiring read."""
        return {self.copies[read] for read in wiring if read is not None}

    def read_by(self, block: int, by_token: bool) -> int:
        """The copy that a block is computed from; with `by_token`, at the tokens of both wirings."""
        rewired, exact = (wiring[block] for wiring in self.wirings)
        if by_token and exact is not None and exact != rewired:
            raise RewriterError(
                f"withheld reference: layer {self.blocks[block].layer} reads late at exact tokens, and "
                "otherwise at the rewired ones, which no copy can stand for. Use --verify none"
            )
        return 0 if rewired is None else self.copies[rewired]

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
            value = copies[of.read_by(index, self.rewired is not None)]
            total = value
            if is_result and index in of.parted and of.ranks > 1:
                total = self.group.all_reduce(self.rank, value)
            copies = [total] * count
            if own is not None and is_result:
                copies[own] = self._withheld(own, value, total)
        if nothing is not None and is_result:
            copies[nothing] = self._withheld(nothing, torch.zeros_like(copies[0]), copies[0])
        return torch.cat(copies)

    def _withheld(self, copy: int, value: torch.Tensor, complete: torch.Tensor) -> torch.Tensor:
        """The addition of a block in a copy: `value` at tokens that some block reads in it, else that of all."""
        rewired, exact = (
            value if copy in self.reference.read_in(wiring) else complete for wiring in self.reference.wirings
        )
        return _by_token(self.rewired, rewired, exact)


class _CoefficientHook:
    """After a module that gives a block its coefficients: where they are late, those of the copy that it reads, for
    every copy."""

    def __init__(
        self, reference: WithheldReference, block: int, places: tuple[int, ...], rewired: torch.Tensor | None
    ) -> None:
        self.reference, self.block, self.places, self.rewired = reference, block, places, rewired

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return self._of(output)
        return type(output)(
            self._of(item) if not self.places or place in self.places else item for place, item in enumerate(output)
        )

    def _of(self, output: torch.Tensor) -> torch.Tensor:
        of, made = self.reference, []
        copies = output.chunk(1 + len(of.copies), 0)
        for own in copies:
            both = []
            for wiring, late in zip(of.wirings, of.mixed_late, strict=True):
                read = wiring[self.block]
                both.append(copies[of.copies[read]] if late[self.block] and read is not None else own)
            made.append(_by_token(self.rewired, *both))
        return torch.cat(made)


def _by_token(rewired: torch.Tensor | None, value: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """`value` at rewired tokens, `exact` at the others, of [B, S, …], [B·S, …] or, by heads, [B, H, S, …]."""
    if rewired is None:
        return value
    if value.shape[:2] == rewired.shape:
        mask = rewired
    elif value.shape[0] == rewired.numel():
        mask = rewired.flatten()
    else:
        mask = rewired[:, None]
    return torch.where(mask.reshape(*mask.shape, *[1] * (value.ndim - mask.ndim)), value, exact)


def _mode(mix: Mapping[int, LayerMode], block: BlockEnds) -> str:
    return mix.get(block.layer, LayerMode()).mode


def _mixes_late(block: BlockEnds, mix: Mapping[int, LayerMode]) -> bool:
    if mix.get(block.layer, LayerMode()).coefficients == "fresh":
        return False
    if block.coefficients is None:
        raise RewriterError(
            f"withheld reference: no module gives the coefficients of {block.sums[0]}'s block in layer {block.layer}, "
            "so that nothing can be given late ones. Use coefficients: fresh, or --verify none"
        )
    return True


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

"""Which independent reference a list of passes is verified with: the passes' options, read as modes of layers.

The options are read here a second time, and not with the passes' own code, since that is what is checked.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from transformers import PreTrainedModel

from rewriter.common.errors import RewriterError
from rewriter.ir import Program
from rewriter.ir.marks import marks
from rewriter.passes.base import Pass, bound_ranks
from rewriter.passes.permute import Permute
from rewriter.passes.selection import resolve
from rewriter.verify.eager_blocks import Plain, Structure, find_structure
from rewriter.verify.output_projections import exit_shares
from rewriter.verify.per_rank_reference import LayerMode, PerRankReference
from rewriter.verify.simulate import load_weights
from rewriter.verify.stream_hooks import few_ids, watched


@dataclass
class Reference:
    """What a rewritten program has to compute. `exact` says that it is the unmodified model itself.

    `passes` are the approximating ones; `whole` are the paths of the modules that every rank computes in full.
    `reordered` are the weights, by runtime name, whose heads and channels a pass put in another order: which of them a
    rank holds is part of what an approximating pass computes.
    """

    passes: Sequence[Pass]
    ranks: int
    whole: tuple[str, ...]
    reordered: Mapping[str, torch.Tensor] = field(default_factory=dict)
    _built: dict[int, PerRankReference] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        return not self.passes

    @property
    def name(self) -> str:
        return "original model" if self.exact else "its reference"

    @torch.no_grad()
    def logits(self, model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
        """Logits [B, S, vocabulary] that the rewritten `model` (eager, unmodified, in eval mode) has to give."""
        if self.exact:
            return original_logits(model, ids)
        if id(model) not in self._built:
            ordered = self.ordered(model)
            mix = layer_modes(ordered, self.passes, self.whole)
            self._built = {id(model): PerRankReference(ordered, mix, self.ranks, whole=self.whole)}
        return self._built[id(model)](ids)

    def ordered(self, model: PreTrainedModel) -> PreTrainedModel:
        """`model`, or a copy with heads and channels in the order in which ranks get them: it has to compute the same.

        Raises RewriterError where a reordered weight is not one of the model's.
        """
        if not self.reordered:
            return model
        other = copy.deepcopy(model)
        if surplus := other.load_state_dict(self.reordered, strict=False).unexpected_keys:
            raise RewriterError(f"{surplus[0]}: the model has no such weight, but it was put in another order")
        return other


def reference_of(program: Program, passes: Sequence[Pass]) -> Reference:
    """The reference of the function that `program` has on one device, made by `passes`.

    Raises RewriterError for a pass that has none.
    """
    approximating = [p for p in passes if p.effect == "approximating" and p.scope != "runtime"]
    for p in approximating:
        if p.name not in _MODES:
            raise RewriterError(f"{p.name}: no independent reference to verify it with. Use --verify none")
    ranks = bound_ranks(program) or 1
    if ranks == 1:
        return Reference(approximating, 1, ())
    return Reference(approximating, ranks, _whole(program), _reordered(program, passes))


def _reordered(program: Program, passes: Sequence[Pass]) -> dict[str, torch.Tensor]:
    origin = (program.origin or program).with_(mesh={})
    moved = origin
    for rewrite in passes:
        if isinstance(rewrite, Permute):
            moved = rewrite.apply(moved)
    changed = {n: p for n, p in moved.parameters.items() if p.expression != origin.parameters[n].expression}
    return load_weights(moved.with_(parameters=changed), torch.float32) if changed else {}


@torch.no_grad()
def original_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Logits [B, S, vocabulary] of the unmodified model."""
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def _whole(program: Program) -> tuple[str, ...]:
    """Paths of the modules called in layers of which nothing is split."""
    split = [name for name, parameter in program.parameters.items() if parameter.ranges is not None]
    called = [str(n.target) for n in program.graph.nodes if n.op == "call_module" and marks(n).layer is not None]
    return tuple(path for path in dict.fromkeys(called) if not any(name.startswith(f"{path}.") for name in split))


def layer_modes(model: PreTrainedModel, passes: Sequence[Pass], whole: Sequence[str]) -> dict[int, LayerMode]:
    """The mode of every layer that a pass selects."""
    structure = find_structure(model)
    reducing = _reducing(model, structure, whole)
    count = max(structure.layers) + 1
    modes: dict[int, LayerMode] = {}
    for rewrite in passes:
        modes |= _MODES[rewrite.name](rewrite, count, reducing)
    return modes


Reducing = Mapping[int, Sequence[bool]]
"""By layer, for each of its blocks: whether it ends in a reduction."""


def _reducing(model: PreTrainedModel, structure: Structure, whole: Sequence[str]) -> dict[int, list[bool]]:
    plain = Plain()
    with torch.no_grad(), watched(model, plain, structure.chain):
        model(input_ids=few_ids(model), use_cache=False)
    hidden = plain.values[0].shape[-1]
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[int, list[bool]] = {}
    for layer, modules in zip(structure.layers, structure.modules, strict=True):
        paths = {names[id(m)]: m for m in modules}
        mine = {p: m for p, m in paths.items() if not any(p == w or p.startswith(f"{w}.") for w in whole)}
        found.setdefault(layer, []).append(any(list(exit_shares(p, m, hidden)) for p, m in mine.items()))
    return found


def _ladder(rewrite: Any, count: int, reducing: Reducing) -> dict[int, LayerMode]:
    mode = LayerMode("ladder" if rewrite.variant == "paper" else "own_partial")
    return dict.fromkeys(resolve(rewrite.layers, count), mode)


def _parallel(rewrite: Any, count: int, reducing: Reducing) -> dict[int, LayerMode]:
    return dict.fromkeys(resolve(rewrite.layers, count), LayerMode("parallel", norm=rewrite.norm))


def _desync(rewrite: Any, count: int, reducing: Reducing) -> dict[int, LayerMode]:
    modes: dict[int, LayerMode] = {}
    for run in runs_of(resolve(rewrite.layers, count)):
        number, place = 0, 0  # reductions, and layers that reduce, of this run so far
        for layer in run:
            keep: list[bool] = []
            choices = iter(rewrite.pattern[place % len(rewrite.pattern)]) if rewrite.pattern else iter(())
            for reduces in reducing[layer]:
                number += reduces
                asked = next(choices, "keep") == "keep" if rewrite.pattern else number % rewrite.n == 0
                keep.append(not reduces or asked)
            place += any(reducing[layer])
            modes[layer] = LayerMode("desync", tuple(keep), rewrite.resync)
    return modes


def _drop_sync(rewrite: Any, count: int, reducing: Reducing) -> dict[int, LayerMode]:
    """The first reduction of each chosen layer goes."""
    modes: dict[int, LayerMode] = {}
    for layer in rewrite.chosen(count):
        first = reducing[layer].index(True)
        keep = tuple(place != first for place in range(len(reducing[layer])))
        modes[layer] = LayerMode("desync", keep, "sum")
    return modes


def runs_of(layers: Sequence[int]) -> Iterator[list[int]]:
    """Layers that follow each other without a gap."""
    for _, run in groupby(enumerate(layers), lambda pair: pair[1] - pair[0]):
        yield [layer for _, layer in run]


_MODES = {"ladder": _ladder, "desync": _desync, "drop_sync": _drop_sync, "parallel_block": _parallel}

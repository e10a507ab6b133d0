"""The independent reference that a list of passes is verified with: what each declares, as modes of layers.

A pass says what each layer has to be (`Pass.reference_modes`), and the reference computes that by itself; or it brings
an oracle. Nothing here imports the analyses or the passes, nor their code by another way: they are what is checked.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby
from types import MappingProxyType
from typing import Any

import torch
from transformers import PreTrainedModel

from rewriter.check.exit_shares import Shares
from rewriter.check.per_rank_reference import LayerMode, PerRankReference
from rewriter.check.stream_hooks import Structure, decoder_layers, find_structure
from rewriter.check.withheld_reference import BlockEnds, WithheldReference
from rewriter.common.errors import RewriterError
from rewriter.ir import Program
from rewriter.ir.coefficients import coefficient_calls
from rewriter.ir.marks import marks
from rewriter.ir.phases import agreed_phase, is_phased
from rewriter.ir.residual import residual_blocks
from rewriter.ir.simulate import load_weights
from rewriter.ir.stream import write_calls

_LATE = ("ladder", "own_partial")  # modes of layers that a copy of the stream can stand for


@dataclass
class ModelReference:
    """The model that a rewritten program has to equal. `exact` says that it is the unmodified model itself.

    `passes` are the approximating ones; `whole` are the paths of the modules that every rank computes in full.
    `reordered` are the weights, by runtime name, whose heads and channels a pass put in another order: which of them a
    rank holds is part of what an approximating pass computes.
    """

    passes: Sequence[Any]
    ranks: int
    whole: tuple[str, ...]
    blocks: Sequence[BlockEnds] = ()
    reordered: Mapping[str, torch.Tensor] = field(default_factory=dict)
    _built: dict[int, PerRankReference | WithheldReference] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        return not self.passes

    @property
    def name(self) -> str:
        return "original model" if self.exact else "its reference"

    @torch.no_grad()
    def logits(
        self,
        model: PreTrainedModel,
        ids: torch.Tensor,
        rewired: torch.Tensor | None = None,
        given: Mapping[str, Any] = MappingProxyType({}),
    ) -> torch.Tensor:
        """Logits [B, S, vocabulary] that the rewritten `model` (eager, unmodified, in eval mode) has to give.

        `given` are further arguments of the model, such as the pixels of a picture.
        Where passes rewire the prompt alone, `rewired` (bool [B, S]) says at which tokens; by default rows are prompts.
        """
        if self.exact:
            return original_logits(model, ids, given)
        if self.passes[0].oracle is not None:
            with ExitStack() as inside:
                for rewrite in self.passes:
                    inside.enter_context(rewrite.oracle(model))
                return original_logits(model, ids, given)
        if id(model) not in self._built:
            self._built = {id(model): self._build(self.ordered(model))}
        phase = agreed_phase(self.passes)
        if rewired is None and phase is not None:
            rewired = phase.rewired(ids.shape[1]).expand(ids.shape)
        return self._built[id(model)](ids, rewired, **given)

    def _build(self, model: PreTrainedModel) -> PerRankReference | WithheldReference:
        whole, both = self.whole, (self.passes, self._of_all_tokens)
        reducing = {layer: [True] * len(list(of)) for layer, of in groupby(self.blocks, lambda block: block.layer)}
        mix, exact = (_modes(len(decoder_layers(model)), passes, reducing) for passes in both)
        try:
            structure = find_structure(model)
        except RewriterError:  # a stream that cannot be followed in torch calls
            return WithheldReference(model, self.blocks, mix, self.ranks, exact=exact, whole=whole)
        # to who follows additions a block with sums inside is several, one that ranks do not share is like any other,
        # and what scales a write is read with it
        alike = len(structure.starts) == len(self.blocks) and not any(b.local or b.mixes for b in self.blocks)
        if not alike and all(mode.mode in _LATE for mode in (*mix.values(), *exact.values())):
            return WithheldReference(model, self.blocks, mix, self.ranks, exact=exact, whole=whole)
        mix, exact = (layer_modes(model, passes, whole, structure) for passes in both)
        return PerRankReference(model, mix, self.ranks, exact=exact, whole=whole)

    @property
    def _of_all_tokens(self) -> list[Any]:
        return [p for p in self.passes if not is_phased(p)]

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


def reference_of(program: Program, passes: Sequence[Any]) -> ModelReference:
    """The reference of the function that `program` has on one device, made by `passes`.

    Raises RewriterError for a pass that has none, and for one with an oracle among others without.
    """
    approximating = [p for p in passes if p.effect == "approximating" and p.scope != "runtime"]
    for p in approximating:
        if p.reference_modes is None and p.oracle is None:
            raise RewriterError(f"{p.name}: no independent reference to verify it with. Use --verify none")
        if (p.oracle is None) != (approximating[0].oracle is None):
            names = f"{approximating[0].name} and {p.name}"
            raise RewriterError(f"{names}: no independent reference of the two together. Use --verify none")
    ranks = program.mesh["tp"] if any(p.scope == "per_rank" for p in passes) else 1
    blocks = block_ends(program)
    if ranks == 1:
        return ModelReference(approximating, 1, (), blocks)
    return ModelReference(approximating, ranks, _whole(program), blocks, _reordered(program, passes))


def block_ends(program: Program) -> list[BlockEnds]:
    """The blocks of the model that `program` was traced from."""
    origin = program.origin or program
    mixing = {marks(n).carry for n in origin.graph.nodes if n.op == "call_module"}
    return [
        BlockEnds(
            block.layer,
            *write_calls(block, origin.modules),
            block.local,
            block.index in mixing,
            coefficient_calls(block),
        )
        for block in residual_blocks(origin)
    ]


def _reordered(program: Program, passes: Sequence[Any]) -> dict[str, torch.Tensor]:
    origin = (program.origin or program).with_(mesh={})
    moved = origin
    for rewrite in passes:
        if rewrite.scope == "model" and rewrite.effect == "exact":
            moved = rewrite.apply(moved)
    changed = {n: p for n, p in moved.parameters.items() if p.expression != origin.parameters[n].expression}
    return load_weights(moved.with_(parameters=changed), torch.float32) if changed else {}


@torch.no_grad()
def original_logits(
    model: PreTrainedModel, ids: torch.Tensor, given: Mapping[str, Any] = MappingProxyType({})
) -> torch.Tensor:
    """Logits [B, S, vocabulary] of the unmodified model."""
    logits: torch.Tensor = model(input_ids=ids, use_cache=False, **given).logits
    return logits


def _whole(program: Program) -> tuple[str, ...]:
    """Paths of the modules called in layers of which nothing is split."""
    split = [name for name, parameter in program.parameters.items() if parameter.ranges is not None]
    called = [str(n.target) for n in program.graph.nodes if n.op == "call_module" and marks(n).layer is not None]
    return tuple(path for path in dict.fromkeys(called) if not any(name.startswith(f"{path}.") for name in split))


def layer_modes(
    model: PreTrainedModel, passes: Sequence[Any], whole: Sequence[str], structure: Structure | None = None
) -> dict[int, LayerMode]:
    """The mode of every layer that a pass selects, in a model whose stream can be followed."""
    structure = structure or find_structure(model)
    return _modes(max(structure.layers) + 1, passes, _reducing(model, structure, whole))


def _modes(count: int, passes: Sequence[Any], reducing: Mapping[int, list[bool]]) -> dict[int, LayerMode]:
    modes: dict[int, LayerMode] = {}
    for rewrite in passes:
        modes |= {n: LayerMode(**mode) for n, mode in rewrite.reference_modes(count, reducing).items()}
    return modes


def _reducing(model: PreTrainedModel, structure: Structure, whole: Sequence[str]) -> dict[int, list[bool]]:
    """A flag for each block of each layer: true if it ends in a reduction."""
    shares = Shares(model, structure, 1, whole)
    by_layer: dict[int, list[bool]] = {}
    for block, layer in enumerate(structure.layers):
        by_layer.setdefault(layer, []).append(shares.splittable(block))
    return by_layer

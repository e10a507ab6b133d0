"""Sync-Point Drop: attention reductions left out in the layers where it costs least."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rewriter.common.errors import RewriterError
from rewriter.ir import Program
from rewriter.ir.ops import SequencePlan
from rewriter.ir.residual import Block, by_layer, residual_blocks
from rewriter.passes.base import Effect, LayerModes, Pass, Reducing, Request, Scope, places_of, record
from rewriter.passes.desync import desynchronise
from rewriter.passes.phases import PhasedPass
from rewriter.passes.residual_rewrite import check_ranks, chosen_blocks, ends_in_sum
from rewriter.passes.selection import Selection, resolve, spans


@dataclass(frozen=True)
class DropSync(PhasedPass):
    """x_r = x + attn_r(norm1(x)), x ← x + AR(attn_r + mlp_r(norm2(x_r))) (SPD, arXiv 2502.20727, sections 3 and 4).

    The attention's partial stays on its rank until the MLP's reduction brings it along: one all-reduce instead of two,
    nothing scaled (desync with `resync: sum`). Where: in `layers`; or else in the `drop` cheapest layers by
    `sensitivity`, the cost of each layer's drop alone (null: nothing to drop there), which is measured above the passes
    and handed in; `measured_on` says with what. `drop` counts layers (an int), or is a fraction in (0, 1] of
    those that could be chosen, rounded down. Of layers that cost the same, later ones go first: their error passes
    through fewer layers. The paper measures in another way: dropping from the last layer on, one after the other.

    The function is bound to the number of ranks. Raises RewriterError on one rank, without layers and sensitivity, and
    for a layer whose attention has no reduction that could wait for a later one of that layer.
    """

    drop: int | float = 0.5
    sensitivity: tuple[float | None, ...] | None = None
    measured_on: str | None = None
    layers: Selection | None = None

    name: ClassVar[str] = "drop_sync"
    effect: ClassVar[Effect] = "approximating"
    scope: ClassVar[Scope] = "per_rank"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.drop > 0 or (isinstance(self.drop, float) and self.drop > 1):
            raise RewriterError(f"drop: {self.drop}; expected a number of layers from 1, or a fraction in (0, 1].")
        if self.sensitivity is not None and not all(c is None or 0 <= c < math.inf for c in self.sensitivity):
            raise RewriterError("sensitivity: costs are numbers from 0, or null where nothing can be dropped.")

    @property
    def request(self) -> Request | None:
        if self.layers is not None or self.sensitivity is not None:
            return None
        return Request(
            "sensitivity",
            "sensitivity",
            "its layers are chosen by a measurement",
            "Give drop_sync.sensitivity (a number per layer, measured on a larger machine) or drop_sync.layers",
        )

    def supposed(self, standard: Program) -> tuple[Mapping[str, Any], str]:
        """As if all layers cost the same: what is counted does not depend on which layers a measurement chooses."""
        droppable, count = attention_reductions(standard), standard.source.num_layers
        costs = tuple(0.0 if layer in droppable else None for layer in range(count))
        layers = replace(self, sensitivity=costs).chosen(count)
        reason = f"which layers cost least is measured on the weights; layers {spans(layers)} stand for them here"
        return {"layers": list(layers)}, reason

    def kinds_of_layers(self, count: int) -> list[set[int]]:
        return [set(self.chosen(count))]

    def shrunken(self, kept: Sequence[int], count: int, plan: SequencePlan | None = None) -> Sequence[Pass]:
        return [replace(self, drop=0.5, sensitivity=None, layers=places_of(self.chosen(count), kept))]

    def reference_modes(self, count: int, reducing: Reducing) -> LayerModes:
        """The first reduction of each chosen layer goes."""
        modes: dict[int, dict[str, Any]] = {}
        for layer in self.chosen(count):
            first = reducing[layer].index(True)
            keep = tuple(place != first for place in range(len(reducing[layer])))
            modes[layer] = {"mode": "desync", "keep": keep, "resync": "sum"}
        return modes

    def chosen(self, num_layers: int) -> tuple[int, ...]:
        """The layers whose attention reductions go, ascending. Raises RewriterError when the options do not say."""
        if self.layers is not None:
            return resolve(self.layers, num_layers)
        if self.sensitivity is None:
            raise RewriterError(
                "drop_sync: which layers cost least is measured on the weights, and "
                f"{self.measured_on or 'there is no measurement'}. Convert a checkpoint, or give drop_sync.sensitivity "
                "(a number per layer) or drop_sync.layers"
            )
        if len(self.sensitivity) != num_layers:
            raise RewriterError(
                f"drop_sync: sensitivity has {len(self.sensitivity)} numbers, the model has {num_layers} layers"
            )
        ranked = sorted((cost, -layer) for layer, cost in enumerate(self.sensitivity) if cost is not None)
        if not ranked:
            raise RewriterError(
                "drop_sync: in no layer can attention's reduction be dropped: it has to be followed by another one of "
                "its layer, with nothing but additions, factors and norms between it and the one residual stream"
            )
        count = self.drop if isinstance(self.drop, int) else int(self.drop * len(ranked))
        if not 0 < count <= len(ranked):
            raise RewriterError(
                f"drop_sync: drop={self.drop} asks for {count} of {len(ranked)} attention reductions that could go"
            )
        return tuple(sorted(-negative for _, negative in ranked[:count]))

    def apply(self, program: Program) -> Program:
        ranks = check_ranks(program, self.name)
        layers = self.chosen(program.source.num_layers)
        droppable = attention_reductions(program)
        kept: dict[int, bool] = {}
        for block in chosen_blocks(program, self.name, layers):
            if block.layer not in droppable:
                raise RewriterError(
                    f"drop_sync: layer {block.layer} has no attention whose reduction could wait for that of a later "
                    f"block of the layer. Layers that have: {list(droppable)}"
                )
            kept[block.index] = block.index != droppable[block.layer].index
        result = desynchronise(program, kept, "sum", self.name)
        where = f"{len(layers)} of {len(droppable)} layers: {', '.join(map(str, layers))}"
        summary = f"attention's reduction dropped on {ranks} ranks in {where}"
        if self.layers is not None or self.sensitivity is None:
            return record(result, self, summary)
        costs = ", ".join(f"{i}: {'–' if cost is None else f'{cost:.3g}'}" for i, cost in enumerate(self.sensitivity))
        source = f" ({self.measured_on})" if self.measured_on else ""
        note = f"what each layer's drop alone costs, KL in nats per token{source}: {costs}"
        return record(result, self, summary, (note,))


def attention_reductions(program: Program) -> dict[int, Block]:
    """By layer, the attention block whose reduction can be dropped: a later block of the layer reduces, too."""
    by_layer_number: dict[int, Block] = {}
    for layer, blocks in by_layer(residual_blocks(program)).items():
        reducing = [b for b in blocks if all(ends_in_sum(w, program.modules) for w in b.writes)]
        if len(reducing) > 1 and reducing[0].kind == "attention":
            by_layer_number[layer] = reducing[0]
    return by_layer_number

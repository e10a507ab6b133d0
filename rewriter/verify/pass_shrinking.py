"""Passes of a real model on its shrunken copy, which has some of its layers: the same choices for each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rewriter.passes.base import Pass
from rewriter.passes.desync import Desync
from rewriter.passes.drop_sync import DropSync
from rewriter.passes.permute import Permute
from rewriter.passes.selection import resolve
from rewriter.verify.reference_modes import runs_of


def kinds_of_layers(rewrite: Pass, count: int) -> list[set[int]]:
    """The layers that a pass treats differently from others, one set for each way."""
    if isinstance(rewrite, DropSync):
        return [set(rewrite.chosen(count))]
    if not hasattr(rewrite, "layers"):
        return []
    chosen = set(resolve(rewrite.layers, count))
    if not isinstance(rewrite, Desync) or rewrite.pattern is None:
        return [chosen]
    places = [(layer, place) for run in runs_of(sorted(chosen)) for place, layer in enumerate(run)]
    length = len(rewrite.pattern)
    return [chosen, *({layer for layer, place in places if place % length == entry} for entry in range(length))]


def on_places(kept: Sequence[int], rewrite: Pass, count: int) -> list[Pass]:
    """The same pass on the kept layers: it selects the places of the layers that it selects in the real model.

    A pattern is told out for each run of places, since layers between those that are kept are gone.
    """
    if isinstance(rewrite, Permute):  # its units are others, and it is to be seen that any order is as good
        counts = [len(set(given)) for given in (rewrite.ranks or {}).values()]
        return [Permute(dealt=rewrite.dealt or max(counts, default=1))]
    if not hasattr(rewrite, "layers"):
        return [rewrite]
    chosen = set(rewrite.chosen(count) if isinstance(rewrite, DropSync) else resolve(rewrite.layers, count))
    places = [place for place, layer in enumerate(kept) if layer in chosen]
    if isinstance(rewrite, DropSync):
        return [DropSync(layers=places)]
    if not isinstance(rewrite, Desync) or rewrite.pattern is None:
        return [dataclasses.replace(rewrite, layers=places)]  # type: ignore[type-var]
    pattern = rewrite.pattern
    entry = {layer: pattern[i % len(pattern)] for run in runs_of(sorted(chosen)) for i, layer in enumerate(run)}
    return [
        dataclasses.replace(rewrite, layers=run, pattern=tuple(entry[kept[place]] for place in run))
        for run in runs_of(places)
    ]

"""The fastest mixes for every rise in loss, where costs and seconds add up: a dynamic program over layers.

What precedes a layer matters to it only by the rewrite that ended there, which is the state. Each state keeps its front
of (cost, seconds), thinned where it grows long: of two labels that are near in cost, the faster one. Without thinning
the result is exact for costs and seconds that add.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rewriter.search.choices import FORMATS, Mix, Placement, mix_of
from rewriter.search.gains import Increments

_LABELS = 160  # of a state


@dataclass(frozen=True)
class Estimate:
    """A mix and what is estimated for it: its cost, and the seconds by which it is faster (negative) than the
    standard."""

    mix: Mix
    cost: float
    seconds: float


@dataclass(frozen=True)
class _Label:
    cost: float
    seconds: float
    before: _Label | None = None
    placement: Placement | None = None
    layers: tuple[int, ...] = ()
    format: str = ""


def front(
    layers: int,
    costs: Mapping[Placement, float],
    format_costs: Mapping[tuple[int, str], float],
    gained: Increments,
    base: str = Mix.base,
) -> list[Estimate]:
    """Mixes of which no other is estimated to cost less and take less time, by rising cost; the standard is the first.

    `costs`: of each placement alone; of two that differ in order alone, the cheaper is taken. `format_costs`: of
    messages by (layer, format).
    """
    options = [_options(layer, costs, format_costs, gained) for layer in range(layers)]
    states: list[dict[str, list[_Label]]] = [{} for _ in range(layers + 1)]
    states[0][""] = [_Label(0.0, 0.0)]
    for layer in range(layers):
        for before, labels in states[layer].items():
            kept = _thinned(labels)
            for name, made in options[layer]:
                length = len(made.layers)
                meeting = gained.meeting.get((before, name), 0.0)
                states[layer + length].setdefault(name, []).extend(
                    _Label(
                        old.cost + made.cost,
                        old.seconds + made.seconds + meeting,
                        old,
                        made.placement,
                        made.layers,
                        made.format,
                    )
                    for old in kept
                )
        states[layer] = {}
    final = _thinned([label for labels in states[layers].values() for label in labels], _LABELS * 4)
    return [Estimate(_mix(label, base), label.cost, label.seconds) for label in final]


def _options(
    layer: int,
    costs: Mapping[Placement, float],
    format_costs: Mapping[tuple[int, str], float],
    gained: Increments,
) -> list[tuple[str, _Label]]:
    """(rewrite, what it adds) of all that can begin in a layer."""
    cheapest: dict[str, Placement] = {}
    for placement, cost in costs.items():
        known = cheapest.get(placement.rewrite)
        if placement.start == layer and (known is None or cost < costs[known]):
            cheapest[placement.rewrite] = placement
    found = [("", _Label(0.0, 0.0, layers=(layer,)))]
    for format in FORMATS:
        seconds = gained.alone.get((Placement(layer, ""), format), 0.0)
        if (layer, format) in format_costs and seconds < 0:
            found.append(("", _Label(format_costs[layer, format], seconds, layers=(layer,), format=format)))
    for name, placement in cheapest.items():
        plain = Placement(placement.start, name)
        for format in ("", *FORMATS):
            if (plain, format) not in gained.alone:
                continue
            messages = [format_costs.get((n, format), math.inf) for n in placement.layers] if format else []
            cost = costs[placement] + sum(messages)
            if cost < math.inf:
                label = _Label(cost, gained.alone[plain, format], None, placement, tuple(placement.layers), format)
                found.append((name, label))
    return found


def _thinned(labels: Sequence[_Label], most: int = _LABELS) -> list[_Label]:
    """Those that no other beats, at most about `most` of them, evenly spread over the logarithm of cost."""
    undominated: list[_Label] = []
    for label in sorted(labels, key=lambda x: (x.cost, x.seconds)):
        if not undominated or label.seconds < undominated[-1].seconds - 1e-12:
            undominated.append(label)
    if len(undominated) <= most:
        return undominated
    low = math.log(max(undominated[1].cost, 1e-12))
    step = max((math.log(max(undominated[-1].cost, 1e-12)) - low) / most, 1e-12)
    kept: dict[int, _Label] = {}
    for label in undominated:  # of those in one interval, the last, which is the fastest
        kept[math.floor((math.log(max(label.cost, 1e-12)) - low) / step)] = label
    return [undominated[0], *(label for label in kept.values() if label is not undominated[0])]


def _mix(label: _Label, base: str) -> Mix:
    placements: list[Placement] = []
    formats: dict[int, str] = {}
    at: _Label | None = label
    while at is not None:
        if at.placement is not None:
            placements.append(at.placement)
        formats |= {layer: at.format for layer in at.layers if at.format}
        at = at.before
    return mix_of(placements, formats, base)

"""Estimates of mixes, where costs and seconds of layers add up, and the front of mixes by these."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import torch

from rewriter.predict.search.choices import Mix, PlacedRewrite, mix_of, of_prompt

_MOST = 160  # mixes of the first layers that are kept
_TRUST = 0.05  # weight of "costs add up" against one measured mix


@dataclass(frozen=True)
class Option:
    """A choice for the layers from `start` on: a rewrite ("" for none) and a format of messages ("" for none).

    `cost`: nats per token. `gain`: seconds by which a generation gets shorter; `edge`: the part of it that is lost
    where the layer before has another rewrite.
    """

    start: int
    layers: int
    rewrite: str = ""
    format: str = ""
    cost: float = 0.0
    gain: float = 0.0
    edge: float = 0.0

    @property
    def of_prompt(self) -> bool:
        """True if it rewires tokens of the prompt alone."""
        return of_prompt(self.rewrite or self.format)


@dataclass(frozen=True)
class Estimate:
    """The options of a mix around `base`, and what is estimated for it: its cost in nats per token, and the seconds by
    which it is faster."""

    cost: float = 0.0
    gain: float = 0.0
    taken: tuple[Option, ...] = ()
    base: str = Mix.base

    @property
    def mix(self) -> Mix:
        formats = {n: o.format for o in self.taken if o.format for n in range(o.start, o.start + o.layers)}
        return mix_of([PlacedRewrite(o.start, o.rewrite) for o in self.taken if o.rewrite], formats, self.base)


@dataclass(frozen=True)
class Costs:
    """Costs of single rewrites of layers, nats per token: mixes of one placement or one format. A `factor` by rewrite
    says how much more it costs in a mix."""

    alone: Mapping[Mix, float]
    factors: Mapping[str, float] = field(default_factory=dict)

    def option(self, option: Option) -> float:
        """The cost of an option; infinite where a part of it was not measured."""
        parts = [mix_of([PlacedRewrite(option.start, option.rewrite)])] if option.rewrite else []
        if option.format:
            parts += [mix_of([], {n: option.format}) for n in range(option.start, option.start + option.layers)]
        return sum(self._factor(mix) * self.alone.get(mix, math.inf) for mix in parts)

    def of(self, mix: Mix) -> float:
        """The estimate for a mix: the sum of what its parts cost alone, times their factors."""
        return sum(self._factor(part) * self.alone[part] for part in mix.parts)

    def _factor(self, part: Mix) -> float:
        return self.factors.get(next(iter(part.counts())), 1.0)

    def fitted(self, measured: Mapping[Mix, float]) -> Costs:
        """The same costs with the factors that estimate `measured` mixes best: least squares of relative errors, and of
        the factors' distance from 1."""
        mixes = [mix for mix, cost in measured.items() if cost > 0 and mix.parts]
        names = sorted({name for mix in mixes for name in mix.counts()})
        if not mixes:
            return self
        rows = torch.zeros(len(mixes), len(names), dtype=torch.float64)
        for row, mix in zip(rows, mixes, strict=True):
            for part in mix.parts:
                row[names.index(next(iter(part.counts())))] += self.alone[part] / measured[mix]
        trust = _TRUST * torch.eye(len(names), dtype=torch.float64)
        left, right = rows.T @ rows + trust, rows.T @ torch.ones(len(mixes), dtype=torch.float64) + trust.sum(1)
        factors = torch.linalg.solve(left, right).clamp(0.1, 10.0).tolist()
        return Costs(self.alone, dict(zip(names, factors, strict=True)))


def front(layers: int, options: Sequence[Option], base: str = Mix.base, cut: float = 0.0) -> list[Estimate]:
    """Mixes of which no other is estimated to cost less and gain as much, by rising cost; the standard is the first.

    `cut`: seconds that a mix loses once if any of its options is for the prompt alone (`Gains.cut`)."""
    whole = _front(layers, [option for option in options if not option.of_prompt], Estimate(base=base))
    if not any(option.of_prompt for option in options):
        return whole
    both = _front(layers, options, Estimate(gain=-cut, base=base))
    return _kept([*whole, *(estimate for estimate in both if any(option.of_prompt for option in estimate.taken))])


def _front(layers: int, options: Sequence[Option], none: Estimate) -> list[Estimate]:
    """The front of mixes that are made from `none`, which has no option.

    Layer by layer: what precedes a layer matters to it only by the rewrite that ended there. Of the mixes of the first
    layers, those that no other beats are kept, thinned where there are many.
    """
    ends: list[dict[str, list[Estimate]]] = [{"": [none]}, *({} for _ in range(layers))]
    for layer, before in enumerate(ends[:-1]):
        here = [Option(layer, 1), *(option for option in options if option.start == layer)]
        for name, estimates in before.items():
            for old in _kept(estimates):
                for option in here:
                    gain = old.gain + option.gain - (option.edge if option.rewrite != name else 0.0)
                    new = Estimate(old.cost + option.cost, gain, (*old.taken, option), none.base)
                    ends[layer + option.layers].setdefault(option.rewrite, []).append(new)
    return _kept([estimate for estimates in ends[-1].values() for estimate in estimates])


def _kept(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Those that no other beats; of more than _MOST the fastest in each interval of the logarithm of cost."""
    best: list[Estimate] = []
    for estimate in sorted(estimates, key=lambda e: (e.cost, -e.gain)):
        if not best or estimate.gain > best[-1].gain + 1e-12:
            best.append(estimate)
    if len(best) <= _MOST:
        return best
    low, high = (math.log(max(estimate.cost, 1e-12)) for estimate in (best[1], best[-1]))
    step = max((high - low) / _MOST, 1e-12)
    thinned = {math.floor((math.log(max(e.cost, 1e-12)) - low) / step): e for e in best[1:]}
    return [best[0], *thinned.values()]


def agreement(estimated: Sequence[float], measured: Sequence[float], errors: Sequence[float]) -> float:
    """Kendall's τ of two orders, over the pairs that differ by more than their errors: 1 where they agree, 1 without
    pairs."""
    agreeing = pairs = 0
    for i, j in combinations(range(len(measured)), 2):
        if abs(measured[i] - measured[j]) > errors[i] + errors[j] and estimated[i] != estimated[j]:
            pairs += 1
            agreeing += 1 if (measured[i] < measured[j]) == (estimated[i] < estimated[j]) else -1
    return agreeing / pairs if pairs else 1.0

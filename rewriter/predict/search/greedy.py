"""Greedy mixes by gain per cost, and the last of them that is within a budget."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate

from rewriter.predict.search.choices import STANDARD, Mix, Part

_FAR = 2.0  # what parts cost in a mix is hardly less than what they cost alone by this factor


@dataclass(frozen=True)
class Option:
    """A part that mixes may have.

    `cost`: its KL(original ‖ rewritten) alone, nats per token. `gain`: seconds by which it is predicted to shorten a
    generation, among others like it; None where it cannot be predicted.
    """

    part: Part
    cost: float
    gain: float | None


Taken = tuple[Option, ...]


def greedy(options: Iterable[Option], begun: Taken = (), most: float = math.inf) -> list[Taken]:
    """Mixes from `begun` on, each made from the one before by the option that gains most per cost. It takes the place
    of those that exclude it, which count against it. Every step gains, and costs less than `most`, nats per token."""
    gaining = [(option, option.part.places, option.gain) for option in options if option.gain and option.gain > 0]
    mixes = [begun]
    while True:
        found, best = None, 0.0
        taken = [(other, other.part.places) for other in mixes[-1]]
        for option, places, alone in gaining:
            replaced = [other for other, theirs in taken if theirs & places]
            gain = alone - sum(other.gain or 0.0 for other in replaced)
            cost = max(option.cost - sum(other.cost for other in replaced), 1e-12)
            if gain > 1e-12 and cost < most and gain / cost > best:
                found, best = (option, places), gain / cost
        if found is None:
            return mixes
        mixes.append((*(other for other, theirs in taken if not theirs & found[1]), found[0]))


@dataclass
class Order:
    """The greedy mixes of `options` around `base`, by rising gain."""

    options: list[Option]
    base: str = STANDARD

    def __post_init__(self) -> None:
        self.mixes = greedy(self.options)

    @property
    def costs(self) -> list[float]:
        """The costs of the mixes' parts, added up, nats per token; never falling."""
        return list(accumulate((sum(option.cost for option in taken) for taken in self.mixes), max))

    def mix(self, number: int) -> Mix:
        """The greedy mix of a number, of which 0 has no parts."""
        return Mix(tuple(option.part for option in self.mixes[number]), self.base)

    def at(self, cost: float) -> Mix:
        """The last one whose costs add up to at most `cost`, nats per token."""
        return self.mix(bisect_right(self.costs, cost) - 1)

    def next(self, budget: float, rise: Callable[[Mix], float | None], halve: bool) -> tuple[Mix, Mix] | None:
        """(the mix to measure next, one that is hardly within the budget); None where none is left.

        `rise`: what a mix was measured to cost, if it was, and `budget`, in nats per token. Between the last mix within
        the budget and the next one beyond it, costs are scaled to what these were measured to cost; `halve` takes the
        middle. Where nothing is between them, steps that cost as much as the one between them are not made any more.
        """
        costs = self.costs
        measured = {n: found for n in range(len(costs)) if (found := rise(self.mix(n))) is not None}
        low = max((n for n, found in measured.items() if found <= budget), default=0)
        high = min((n for n, found in measured.items() if n > low and found > budget), default=len(costs))
        if high == low + 1 == len(costs):
            return None
        if high == low + 1:
            begun, step = self.mixes[low], (costs[high] - costs[low]) * (1 - 1e-9)
            self.mixes = [*self.mixes[:low], *greedy(self.options, begun, step)]
            return self.next(budget, rise, halve)
        spent = measured.get(low, 0.0)
        scale = costs[low] / spent if spent > 0 else 1.0
        if high in measured:
            scale = (costs[high] - costs[low]) / (measured[high] - spent)
        near, far = (bisect_right(costs, costs[low] + n * scale * (budget - spent)) - 1 for n in (1, _FAR))
        near = (low + high) // 2 if halve else near
        return self.mix(min(max(near, low + 1), high - 1)), self.mix(min(max(far, low + 1), high - 1))

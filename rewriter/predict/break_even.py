"""The time of an all-reduce from which on a recipe pays.

All all-reduces of a phase are made to take the same time d, no matter their size, the wait for the last rank included;
everything else stays as it is on the fabric, also the SMs and memory traffic that they take. A quantized all-reduce
keeps its ratio to the exact one: its messages take d · (their time on the fabric) / (the exact all-reduce's). The
break-even is the d at which the recipe's phase takes as long as the first recipe's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from rewriter.fabric import Call, Delay
from rewriter.predict.steps import Begin, Step
from rewriter.predict.timeline import Delays, KernelDurations, Timeline

LONGEST = 1.0  # second: the longest all-reduce that is considered
_CLOSE = 1e-3  # of a phase: less is no gain; launches that happen to fuse otherwise make such differences
_PRECISION = 1e-8  # seconds


def constant(d: float, delays: Delays) -> Delays:
    known: dict[tuple[Call, Call], Delay] = {}

    def of(begin: Begin, call: Call) -> Delay:
        if not begin.reduction:
            return delays(begin, call)
        key = (begin.exact, call)
        if key not in known:
            usual, exact = delays(begin, call), delays(begin, begin.exact).seconds
            known[key] = usual.lasting(d * usual.seconds / exact if exact else d)
        return known[key]

    return of


class BreakEven:
    """Compares recipes with the first one, whose times it keeps: all are searched at the same places.

    Each is given as the calls of its phase, one after the other."""

    def __init__(self, first: Sequence[Sequence[Step]], durations: KernelDurations, delays: Delays) -> None:
        self.durations, self.delays = durations, delays
        self._first = cache(lambda d: self._time(first, d))

    def of(self, recipe: Sequence[Sequence[Step]]) -> tuple[float | None, str | None]:
        """(seconds, None), or (None, why there is none). `recipe` beats the first while an all-reduce takes longer.

        Solved by bisection between 0 and 1 second, on the simulation itself.
        """
        scale = self._first(0.0)

        def gain(d: float) -> float:
            """Seconds that the recipe saves, as a part of the first one's time without all-reduces."""
            return (self._first(d) - self._time(recipe, d)) / scale if scale else 0.0

        least, most = gain(0.0), gain(LONGEST)
        if abs(least) <= _CLOSE and abs(most) <= _CLOSE:
            return None, "it takes as long, however long an all-reduce takes"
        if most <= _CLOSE and least <= _CLOSE:
            return None, "never: the first recipe is faster, however long an all-reduce takes"
        if most > _CLOSE and least > _CLOSE:
            return None, "always: it is faster even if an all-reduce takes no time"
        crossing = _bisect(gain, most > _CLOSE)
        if most <= _CLOSE:
            return None, f"below {crossing * 1e6:.1f} µs: it pays only while an all-reduce takes less"
        return crossing, None

    def _time(self, calls: Sequence[Sequence[Step]], d: float) -> float:
        delays = constant(d, self.delays)
        return sum(Timeline(self.durations, delays, record=False).run(steps) for steps in calls)


def _bisect(gain: Callable[[float], float], rising: bool) -> float:
    """The place where `gain` crosses _CLOSE. First the order of magnitude, then halves."""
    low, high = 0.0, 1e-6
    while high < LONGEST and (gain(high) > _CLOSE) != rising:
        low, high = high, high * 8
    high = min(high, LONGEST)
    while high - low > max(_PRECISION, 4e-3 * high):
        middle = (low + high) / 2
        low, high = (low, middle) if (gain(middle) > _CLOSE) == rising else (middle, high)
    return (low + high) / 2

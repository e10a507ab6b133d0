"""From which all-reduce time on a recipe pays.

All all-reduces of a phase are made to take the same time d, whatever their size; everything else stays as it is on the
fabric, also the SMs and memory traffic that they take. A quantized all-reduce keeps its ratio to the exact one: its
messages take d · (their time on the fabric) / (the exact all-reduce's). The break-even is the d at which the recipe's
phase takes as long as the first recipe's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rewriter.fabric import Call, Delay
from rewriter.predict.steps import Begin, Step
from rewriter.predict.timeline import Delays, Durations, Timeline

LONGEST = 1.0  # second: the longest all-reduce that is considered
_CLOSE = 1e-3  # of a phase: less is no gain; launches that happen to fuse otherwise make such differences
_PRECISION = 1e-8  # seconds


def constant(d: float, delays: Delays) -> Delays:
    """Delays in which every all-reduce takes `d` seconds."""

    def of(begin: Begin, call: Call) -> Delay:
        if not begin.reduction:
            return delays(begin, call)
        known = delays(begin, call)
        if len(begin.parts) == 1:
            return known.lasting(d)
        exact = delays(begin, begin.exact).seconds
        return known.lasting(d * known.seconds / exact if exact else d)

    return of


def break_even(
    first: Sequence[Step], recipe: Sequence[Step], durations: Durations, delays: Delays
) -> tuple[float | None, str | None]:
    """(seconds, None), or (None, why there is none). `recipe` beats `first` while an all-reduce takes longer.

    Solved by bisection between 0 and 1 second, on the simulation itself.
    """

    def time(listed: Sequence[Step], d: float) -> float:
        return Timeline(durations, constant(d, delays), record=False).run(listed)

    scale = time(first, 0.0)

    def gain(d: float) -> float:
        """By how much the recipe is faster, as a part of the first one's time without all-reduces."""
        return (time(first, d) - time(recipe, d)) / scale if scale else 0.0

    least, most = gain(0.0), gain(LONGEST)
    if abs(least) <= _CLOSE and abs(most) <= _CLOSE:
        return None, "it takes as long, whatever an all-reduce takes"
    if most <= _CLOSE and least <= _CLOSE:
        return None, "never: the first recipe is faster, whatever an all-reduce takes"
    if most > _CLOSE and least > _CLOSE:
        return None, "always: it is faster even if an all-reduce takes no time"
    crossing = _bisect(gain, most > _CLOSE)
    if most <= _CLOSE:
        return None, f"only while an all-reduce takes less than {crossing * 1e6:.1f} µs"
    return crossing, None


def _bisect(gain: Callable[[float], float], rising: bool) -> float:
    """Where `gain` crosses _CLOSE. First the order of magnitude, then halves."""
    low, high = 0.0, LONGEST
    bound = 1e-6
    while bound < LONGEST:
        if (gain(bound) > _CLOSE) == rising:
            high = bound
            break
        low, bound = bound, bound * 8
    while high - low > max(_PRECISION, 1e-3 * high):
        middle = (low + high) / 2
        low, high = (low, middle) if (gain(middle) > _CLOSE) == rising else (middle, high)
    return (low + high) / 2

"""Durations measured at some sizes, and those of the sizes between."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from rewriter.common.errors import RewriterError


@dataclass(frozen=True)
class Point:
    """One measurement: `nbytes` as in `Call`, `seconds`, the CPU time it took of a rank's own core, and the seconds
    that it takes where that core computes meanwhile, 0 standing for as long."""

    nbytes: int
    seconds: float
    cpu_seconds: float = 0.0
    busy_seconds: float = 0.0

    @property
    def hindrance(self) -> float:
        return max(0.0, self.busy_seconds - self.seconds)


@dataclass(frozen=True)
class Curve:
    """Measurements of one collective among one number of ranks, by rising size, each size once.

    Between sizes: monotone cubics in log-log (PCHIP: Fritsch & Butland, SIAM J. Sci. Stat. Comput. 5(2), 1984). They
    pass through every point and never leave the range of its neighbours, so that a step of the library from one
    protocol to another makes no waves. Below the smallest size: constant. Above the largest: at the
    bandwidth between the last two sizes.

    Raises RewriterError without points, or with a size or duration that is not positive.
    """

    points: tuple[Point, ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise RewriterError("a curve without measurements: give at least one size.")
        for point in self.points:
            others = (point.cpu_seconds, point.busy_seconds)
            if point.nbytes <= 0 or not (0 < point.seconds < math.inf) or not all(0 <= s < math.inf for s in others):
                raise RewriterError(f"{point}: sizes and durations must be positive and finite.")
        if any(a.nbytes >= b.nbytes for a, b in pairwise(self.points)):
            raise RewriterError("a curve's sizes must rise, each once.")

    @classmethod
    def of(cls, measured: Iterable[Point]) -> Curve:
        """Of measurements in any order. Of a size that was measured more than once, the median."""
        sizes: dict[int, list[Point]] = {}
        for point in measured:
            sizes.setdefault(point.nbytes, []).append(point)

        def median(same: list[Point], figure: str) -> float:
            return statistics.median(getattr(point, figure) for point in same)

        figures = ("seconds", "cpu_seconds", "busy_seconds")
        return cls(tuple(Point(size, *(median(same, f) for f in figures)) for size, same in sorted(sizes.items())))

    @property
    def latency(self) -> float:
        """Seconds of the smallest message: what does not come from its size."""
        return self.points[0].seconds

    def seconds(self, nbytes: float) -> float:
        last = self.points[-1]
        if nbytes > last.nbytes:
            before = self.points[-2] if len(self.points) > 1 else Point(0, 0.0)
            slope = max(0.0, (last.seconds - before.seconds) / (last.nbytes - before.nbytes))
            return last.seconds + slope * (nbytes - last.nbytes)
        return math.exp(self._spline(math.log(max(nbytes, self.points[0].nbytes))))

    def cpu_seconds(self, nbytes: float) -> float:
        return self._linear(nbytes, [point.cpu_seconds for point in self.points])

    def hindrance(self, nbytes: float) -> float:
        """How many seconds longer `nbytes` take beside computation."""
        return self._linear(nbytes, [point.hindrance for point in self.points])

    def _linear(self, nbytes: float, values: Sequence[float]) -> float:
        """Linear between sizes: the values of points may be 0, where no logarithm is. Beyond them as the seconds."""
        points = self.points
        index = bisect_right([point.nbytes for point in points], nbytes)
        if index == 0:
            return values[0]
        if index == len(points):
            return values[-1] * (self.seconds(nbytes) / points[-1].seconds)
        low, high = points[index - 1].nbytes, points[index].nbytes
        return values[index - 1] + (nbytes - low) / (high - low) * (values[index] - values[index - 1])

    def errors(self) -> tuple[float, ...]:
        """Of each size between the first and the last: |predicted / measured - 1|, predicted by all the others."""
        inner = range(1, len(self.points) - 1)
        without = (Curve(self.points[:i] + self.points[i + 1 :]).seconds(self.points[i].nbytes) for i in inner)
        return tuple(abs(found / self.points[i].seconds - 1) for i, found in zip(inner, without, strict=True))

    @cached_property
    def _spline(self) -> Callable[[float], float]:
        sizes, seconds = ([getattr(point, figure) for point in self.points] for figure in ("nbytes", "seconds"))
        return _monotone_cubic([*map(math.log, sizes)], [*map(math.log, seconds)])


def _monotone_cubic(x: Sequence[float], y: Sequence[float]) -> Callable[[float], float]:
    """PCHIP through (x, y), with rising x; constant beyond."""
    steps = [b - a for a, b in pairwise(x)]
    slopes = [(b - a) / step for (a, b), step in zip(pairwise(y), steps, strict=True)]
    inner = []
    for (before, after), (left, right) in zip(pairwise(slopes), pairwise(steps), strict=True):
        w1, w2 = 2 * right + left, right + 2 * left
        inner.append(0.0 if before * after <= 0 else (w1 + w2) / (w1 / before + w2 / after))
    tangents = [slopes[0], *inner, slopes[-1]] if slopes else [0.0]

    def value(at: float) -> float:
        if at <= x[0]:
            return y[0]
        if at >= x[-1]:
            return y[-1]
        index = bisect_right(x, at) - 1
        step = x[index + 1] - x[index]
        t = (at - x[index]) / step
        return (
            (1 + 2 * t) * (1 - t) ** 2 * y[index]
            + t * (1 - t) ** 2 * step * tangents[index]
            + t * t * (3 - 2 * t) * y[index + 1]
            + t * t * (t - 1) * step * tangents[index + 1]
        )

    return value

"""Tables of measured collectives: curves of durations by size, those that ship, and how one is chosen."""

from __future__ import annotations

import csv
import math
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import cast

from rewriter.common.errors import RewriterError
from rewriter.fabric.calls import Kind

CSV = Path(__file__).parent / "data" / "collective-latency.csv"
SOURCE = "NVIDIA AIConfigurator, commit 095f58a51 (Apache-2.0)"

_SIXTEEN_BITS = ("half", "float16", "bfloat16")


@dataclass(frozen=True)
class CurvePoint:
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
    """

    points: tuple[CurvePoint, ...]

    @classmethod
    def of(cls, measured: Iterable[CurvePoint]) -> Curve:
        """The curve of measurements in any order; the median of a size that was measured more than once."""
        sizes: dict[int, list[CurvePoint]] = {}
        for point in measured:
            sizes.setdefault(point.nbytes, []).append(point)

        def median(same: list[CurvePoint], figure: str) -> float:
            return statistics.median(getattr(point, figure) for point in same)

        figures = ("seconds", "cpu_seconds", "busy_seconds")
        return cls(tuple(CurvePoint(size, *(median(same, f) for f in figures)) for size, same in sorted(sizes.items())))

    @property
    def latency(self) -> float:
        """Seconds of the smallest message: what does not come from its size."""
        return self.points[0].seconds

    def seconds(self, nbytes: float) -> float:
        last = self.points[-1]
        if nbytes > last.nbytes:
            before = self.points[-2] if len(self.points) > 1 else CurvePoint(0, 0.0)
            slope = max(0.0, (last.seconds - before.seconds) / (last.nbytes - before.nbytes))
            return last.seconds + slope * (nbytes - last.nbytes)
        return math.exp(self._spline(math.log(max(nbytes, self.points[0].nbytes))))

    def cpu_seconds(self, nbytes: float) -> float:
        return self._linear(nbytes, [point.cpu_seconds for point in self.points])

    def hindrance(self, nbytes: float) -> float:
        """Seconds by which `nbytes` take longer while the rank computes."""
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
        """Error of each size between the first and the last: |predicted / measured - 1|, predicted by all others."""
        inner = range(1, len(self.points) - 1)
        without = (Curve(self.points[:i] + self.points[i + 1 :]).seconds(self.points[i].nbytes) for i in inner)
        return tuple(abs(other / self.points[i].seconds - 1) for i, other in zip(inner, without, strict=True))

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


@dataclass(frozen=True)
class TableKey:
    """Conditions in which a table was measured.

    `dtype`: as written where it was measured. `graphed`: replayed from a CUDA graph. Tables of nccl-tests, which
    launches back to back, hold no host time and serve both.
    """

    system: str
    library: str
    version: str
    implementation: str
    graphed: bool
    dtype: str

    def __str__(self) -> str:
        how = "" if self.library == "nccl" else ", graphed" if self.graphed else ", eager"
        return f"{self.system} {self.library} {self.version} ({self.implementation}, {self.dtype}{how})"


@dataclass(frozen=True)
class Table:
    """Curves by collective and number of ranks. `source` says who measured them. `most_bytes`: the largest message that
    engines give the library; None: any."""

    key: TableKey
    curves: Mapping[tuple[Kind, int], Curve]
    source: str = SOURCE
    most_bytes: int | None = None

    @property
    def library(self) -> str:
        return self.key.library

    def errors(self) -> list[float]:
        """The leave-one-out errors of all curves."""
        return [error for curve in self.curves.values() for error in curve.errors()]


@cache
def shipped() -> Mapping[TableKey, Table]:
    """The tables of the package, from data/collective-latency.csv."""
    points: dict[TableKey, dict[tuple[Kind, int], list[CurvePoint]]] = defaultdict(lambda: defaultdict(list))
    with CSV.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            kernel = row["kernel"]
            name = kernel.removesuffix("_graph").removesuffix("_eager")
            graphed = not kernel.endswith("_eager")
            key = TableKey(row["system"], row["library"], row["library_version"], name, graphed, row["dtype"])
            kind = cast(Kind, row["op"].replace("alltoall", "all_to_all"))
            point = CurvePoint(int(row["bytes"]), float(row["latency_us"]) * 1e-6)
            points[key][kind, int(row["gpus"])].append(point)
    return {
        key: Table(key, {what: Curve.of(measured) for what, measured in sorted(curves.items())})
        for key, curves in points.items()
    }


def shipped_table(system: str, library: str, version: str, graphed: bool = True) -> Table | None:
    """The shipped table of a system and a version of a library, of 16-bit numbers; None where it was not measured in
    this way.

    Raises RewriterError where it was in neither, with those that there are.
    """
    known = [key for key in shipped() if key.system == system]
    fits = [key for key in known if (key.library, key.version) == (library, version) and key.dtype in _SIXTEEN_BITS]
    if not fits:
        there = "; ".join(sorted({str(key) for key in known})) or "none"
        raise RewriterError(f"{library} {version}: no table of {system} is shipped. There are: {there}.")
    return next((shipped()[key] for key in fits if key.graphed == graphed or library == "nccl"), None)

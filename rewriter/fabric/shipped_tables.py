"""Tables of measured collectives: those that ship, and how one is chosen."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

from rewriter.common.errors import RewriterError
from rewriter.fabric.calls import Kind
from rewriter.fabric.curves import Curve, Point

CSV = Path(__file__).parent / "data" / "collective-latency.csv"
SOURCE = "NVIDIA AIConfigurator, commit 095f58a51 (Apache-2.0)"

_BYTES = {"half": 2, "float16": 2, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True)
class TableKey:
    """What a table was measured with.

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
    """Curves by collective and number of ranks. `source` says who measured them."""

    key: TableKey
    curves: Mapping[tuple[Kind, int], Curve]
    source: str = SOURCE

    @property
    def library(self) -> str:
        return self.key.library

    @property
    def errors(self) -> dict[tuple[Kind, int], tuple[float, ...]]:
        """The leave-one-out errors of each curve (see `Curve.errors`)."""
        return {what: curve.errors() for what, curve in self.curves.items()}


@cache
def shipped() -> Mapping[TableKey, Table]:
    """The tables of the package, from data/collective-latency.csv."""
    points: dict[TableKey, dict[tuple[Kind, int], list[Point]]] = defaultdict(lambda: defaultdict(list))
    with CSV.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            kernel = row["kernel"]
            name = kernel.removesuffix("_graph").removesuffix("_eager")
            graphed = not kernel.endswith("_eager")
            key = TableKey(row["system"], row["library"], row["library_version"], name, graphed, row["dtype"])
            kind = cast(Kind, row["op"].replace("alltoall", "all_to_all"))
            point = Point(int(row["bytes"]), float(row["latency_us"]) * 1e-6)
            points[key][kind, int(row["gpus"])].append(point)
    return {
        key: Table(key, {what: Curve.of(found) for what, found in sorted(curves.items())})
        for key, curves in points.items()
    }


def find(system: str, library: str, *, version: str, graphed: bool = True) -> Table:
    """The shipped table of a system and a version of a library; of 16-bit numbers.

    Raises RewriterError where there is none, with those that there are.
    """
    known = [key for key in shipped() if key.system == system]
    for key in known:
        fits = (key.library, key.version) == (library, version) and _BYTES[key.dtype] == 2
        if fits and (key.graphed == graphed or key.library == "nccl"):
            return shipped()[key]
    there = "; ".join(sorted({str(key) for key in known})) or "none"
    how = "graphed" if graphed else "eager"
    raise RewriterError(f"{library} {version} {how}: no table of {system} is shipped. There are: {there}.")

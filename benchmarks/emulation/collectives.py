"""Does one real rank with an emulated peer take as long as two real ones? All-reduce and all-gather, by size.

    sudo python -m benchmarks.emulation.collectives [--quick] [--rate BYTES_PER_SECOND] [--launches N] [--json]

Ground truth: two gloo ranks in network namespaces joined by a veth pair, one core each. Their times at every other size
from 1 KB to 64 MB become a fabric file; at the sizes between, 1 real and 1 emulated rank run the same script under
`python -m rewriter.emulation`, in delay mode, and in wire mode with the environment process in the other
namespace. Launches take turns; each emulated one uses the real launches before it. Reported per size: the median over
launches, the error against the real one, and how far real launches lie from their own median. Exit code: 0 where all
errors from 8 MB up are within 4 % (median 1.5 %), and those below within 4 % or the real launches' own spread,
whichever is larger; 1 otherwise; 2 where it cannot be measured.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.emulation.jobs import Job
from benchmarks.support.namespaces import INTERFACE, Link, LinkError
from rewriter.common.errors import RewriterError

KINDS = ("all_reduce", "all_gather")
SIZES = tuple(1 << power for power in range(10, 27))
CALIBRATED, SCORED = SIZES[::2], SIZES[1::2]
MODES = ("delay", "wire")
LARGE = 8 << 20
LIMIT, MEDIAN_LIMIT = 0.04, 0.015
PORT = 29600

Cell = tuple[str, int]  # kind, bytes


@dataclass(frozen=True)
class Score:
    """One size in one mode, medians over launches: seconds and CPU seconds of a call, bytes that rank 0 sends, with
    headers. `spread`: how far real launches lie from their median."""

    mode: str
    kind: str
    nbytes: int
    real: float
    emulated: float
    spread: float
    real_cpu: float
    emulated_cpu: float
    real_bytes: float
    emulated_bytes: float

    @property
    def error(self) -> float:
        return self.emulated / self.real - 1

    @property
    def limit(self) -> float:
        return LIMIT if self.nbytes >= LARGE else max(LIMIT, self.spread)


class Bench:
    """Launches of both ranks, or of one and its environment, in a directory."""

    def __init__(self, directory: Path, link: Link, sizes: Sequence[int], block_seconds: float) -> None:
        self.directory, self.link, self.sizes, self.block_seconds = directory, link, sizes, block_seconds
        self.cores = sorted(os.sched_getaffinity(0))[:2]
        if len(self.cores) < 2:
            raise RewriterError("emulation: it needs two cores, one for each rank; this process may use one")

    def real(self) -> dict[Cell, dict[str, float]]:
        """Both ranks real: rank 0's times."""
        with tempfile.TemporaryDirectory(dir=self.directory) as name:
            return self._run(Path(name), [self._script(Path(name), rank) for rank in range(2)], 2)

    def emulated(self, mode: str, fabric: Path) -> dict[Cell, dict[str, float]]:
        """Rank 0 real, in the same place as before; its environment, if it has one, in the other rank's."""
        with tempfile.TemporaryDirectory(dir=self.directory) as name:
            launcher = ["-m", "rewriter.emulation", "--world-size", "2", "--fabric", str(fabric), "--mode", mode]
            script, commands = self._script(Path(name), 0), []
            if mode == "wire":
                address = f"10.0.0.2:{PORT}"
                commands.append([*launcher, "--serve", address])
                launcher += ["--environment", address]
            return self._run(Path(name), [[*launcher, *script], *commands], 1)

    def _script(self, scratch: Path, rank: int) -> list[str]:
        spec = {
            "store": f"{scratch}/store",
            "kinds": KINDS,
            "sizes": self.sizes,
            "block_seconds": self.block_seconds,
            "interface": INTERFACE,
        }
        (scratch / "spec.json").write_text(json.dumps(spec))
        name = str(Path(__file__).with_name("collectives_rank.py"))
        return [name, str(scratch / "spec.json"), str(scratch / f"result-{rank}.json")]

    def _run(self, scratch: Path, commands: Sequence[Sequence[str]], ranks: int) -> dict[Cell, dict[str, float]]:
        """Start all; the first `ranks` of them are waited for."""
        job = Job(self.link, self.cores, commands, "a launch", ranks)
        try:
            job.wait()
        finally:
            job.stop()
        return {(one["kind"], one["nbytes"]): one for one in json.loads((scratch / "result-0.json").read_text())}

    def fabric(self, launches: Sequence[dict[Cell, dict[str, float]]], calibrated: Sequence[int]) -> Path:
        """A fabric file of medians at the calibrated sizes alone."""
        points = [
            {
                "kind": kind,
                "ranks": 2,
                "bytes": nbytes,
                "seconds": statistics.median(launch[kind, nbytes]["seconds"] for launch in launches),
                "cpu_seconds": statistics.median(launch[kind, nbytes]["cpu_seconds"] for launch in launches),
            }
            for kind in KINDS
            for nbytes in calibrated
        ]
        largest = next(p for p in reversed(points) if p["kind"] == "all_gather")
        path = self.directory / "measured.yaml"
        path.write_text(yaml.safe_dump(fabric_file(points, largest["bytes"] / 2 / largest["seconds"]), sort_keys=False))
        return path


def fabric_file(points: list[dict[str, Any]], bandwidth: float) -> dict[str, Any]:
    """What `rewriter.fabric` reads. Only the collectives matter here; the device's figures are not used."""

    def unused(value: float) -> dict[str, Any]:
        return {"value": value, "source": "not used by this benchmark"}

    return {
        "name": "namespaces",
        "summary": "Two network namespaces on one machine, one core each",
        "modelled": False,
        "device": {
            "name": "CPU core",
            "flops": {"float32": unused(5e10)},
            "efficiency": unused(0.8),
            "attention_flops": unused(5e10),
            "memory_bytes": unused(1 << 30),
            "memory_bandwidth": unused(1e10),
            "memory_efficiency": unused(0.8),
            "call_seconds": unused(1e-5),
            "launch_seconds": unused(1e-6),
            "graphed_launch_seconds": unused(1e-6),
            "multiprocessors": unused(1),
        },
        "node": unused(1),
        "between": {"latency": unused(points[0]["seconds"]), "bandwidth": unused(bandwidth)},
        "model": "measured",
        "measurements": {
            "library": "gloo",
            "version": str(torch.__version__),
            "source": "benchmarks/emulation/collectives.py",
            "points": points,
        },
    }


def measure(
    bench: Bench, calibrated: Sequence[int], scored: Sequence[int], before: int, launches: int, console: Console
) -> list[Score]:
    """`before` real launches to begin with, then `launches` turns of real and emulated ones."""
    real = []
    emulated: dict[str, list[dict[Cell, dict[str, float]]]] = {mode: [] for mode in MODES}
    for number in range(before):
        real.append(bench.real())
        console.print(f"real launch {number + 1} of {before}: {shown(real[-1], scored)}")
    for number in range(launches):
        fabric = bench.fabric(real, calibrated)
        for mode in MODES:
            emulated[mode].append(bench.emulated(mode, fabric))
            console.print(f"turn {number + 1}, {mode}: {shown(emulated[mode][-1], scored)}")
        real.append(bench.real())
        console.print(f"turn {number + 1}, real: {shown(real[-1], scored)}")
    return [score(mode, kind, nbytes, real, emulated[mode]) for mode in MODES for kind in KINDS for nbytes in scored]


def score(
    mode: str,
    kind: str,
    nbytes: int,
    real: Sequence[dict[Cell, dict[str, float]]],
    emulated: Sequence[dict[Cell, dict[str, float]]],
) -> Score:
    cell = (kind, nbytes)
    times = [launch[cell]["seconds"] for launch in real]
    middle = statistics.median(times)

    def median(launches: Sequence[dict[Cell, dict[str, float]]], what: str) -> float:
        return statistics.median(launch[cell][what] for launch in launches)

    return Score(
        mode, kind, nbytes, middle, median(emulated, "seconds"), max(abs(t / middle - 1) for t in times),
        median(real, "cpu_seconds"), median(emulated, "cpu_seconds"), median(real, "sent_bytes"),
        median(emulated, "sent_bytes"),
    )  # fmt: skip


def shown(launch: dict[Cell, dict[str, float]], sizes: Sequence[int]) -> str:
    some = (sizes[0], sizes[len(sizes) // 2], sizes[-1])
    return ", ".join(f"{k} {named(n)} {launch[k, n]['seconds'] * 1e3:.3f} ms" for k in KINDS for n in some)


def named(nbytes: int) -> str:
    return f"{nbytes >> 20} MB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KB"


def table(scores: Sequence[Score]) -> Table:
    """What a person reads."""
    found = Table(title="one real and one emulated rank against two real ones: ms, medians over launches; bytes sent")
    columns = (
        "mode",
        "collective",
        "size",
        "real",
        "emulated",
        "error",
        "real spread",
        "limit",
        "CPU real",
        "CPU emulated",
        "bytes",
    )
    for column in columns:
        found.add_column(column, justify="left" if column in ("mode", "collective") else "right")
    for s in scores:
        found.add_row(
            s.mode, s.kind, named(s.nbytes), f"{s.real * 1e3:.3f}", f"{s.emulated * 1e3:.3f}", f"{s.error:+.1%}",
            f"±{s.spread:.1%}", f"{s.limit:.1%}", f"{s.real_cpu * 1e3:.3f}", f"{s.emulated_cpu * 1e3:.3f}",
            f"{s.emulated_bytes / s.real_bytes:.3f} ×" if s.mode == "wire" else "",
            style="red" if abs(s.error) > s.limit else "",
        )  # fmt: skip
    return found


def verdicts(scores: Sequence[Score]) -> list[tuple[str, bool]]:
    """What is promised, and whether it holds."""
    found = []
    for mode in MODES:
        of = [s for s in scores if s.mode == mode]
        large = [abs(s.error) for s in of if s.nbytes >= LARGE]
        if large:
            text = f"from 8 MB up: median {statistics.median(large):.1%}, largest {max(large):.1%}"
            found.append((f"{mode}: {text}", max(large) <= LIMIT and statistics.median(large) <= MEDIAN_LIMIT))
        small = [s for s in of if s.nbytes < LARGE]
        beyond = [s for s in small if abs(s.error) > s.limit]
        text = f"below 8 MB: {len(small) - len(beyond)} of {len(small)} within their limit"
        found.append((f"{mode}: {text}, median {statistics.median(abs(s.error) for s in small):.1%}", not beyond))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Emulated collectives against real ones.")
    parser.add_argument("--launches", type=int, default=5, help="turns of a real and the emulated launches (default 5)")
    parser.add_argument("--before", type=int, default=3, help="real launches before the first turn (default 3)")
    parser.add_argument(
        "--rate", type=float, help="limit of the link in each direction, bytes per second; none if left out"
    )
    parser.add_argument("--quick", action="store_true", help="few sizes, one launch: does it run? No verdict")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, progress goes to stderr")
    options = parser.parse_args()
    console = Console(stderr=options.json, highlight=False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    calibrated, scored = CALIBRATED, SCORED
    if options.quick:
        calibrated, scored = (1 << 10, 1 << 14, 1 << 20), (1 << 12, 1 << 17)
    try:
        with tempfile.TemporaryDirectory(prefix="emulation-") as name, Link() as link:
            link.set_rate(options.rate)
            bench = Bench(Path(name), link, sorted({*calibrated, *scored}), 0.005 if options.quick else 0.04)
            before, launches = (1, 1) if options.quick else (options.before, options.launches)
            scores = measure(bench, calibrated, scored, before, launches, console)
            if options.rate and link.dropped():
                console.print(f"the link dropped {link.dropped()} segments", style="red")
    except (LinkError, RewriterError) as error:
        console.print(f"error: {error}", style="red", markup=False)
        return 2
    found = verdicts(scores)
    if options.json:
        rows = [{**asdict(s), "error": s.error, "limit": s.limit} for s in scores]
        print(json.dumps({"rate": options.rate, "scores": rows, "verdicts": found}, indent=2))
    else:
        console.print(table(scores))
    for text, holds in found:
        console.print(text, style="" if holds else "red")
    return 0 if options.quick or all(holds for _, holds in found) else 1


if __name__ == "__main__":
    sys.exit(main())

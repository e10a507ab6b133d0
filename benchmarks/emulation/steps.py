"""Whole steps, emulated against real: two gloo ranks in network namespaces, and one of them with the other emulated.

    sudo python -m benchmarks.emulation.steps [--part recipes|added|all] [--fabric FILE] [--quick] [--json FILE]

Each rank has one core and a namespace of its own; a rate-limited pair of interfaces joins them. The delays of the
emulation are those that `rewrite fabrics calibrate` measures between the two namespaces, of collectives alone: no step
is calibrated on. `--fabric` keeps them in a file, and takes them from it where it exists: six minutes less. Then
three jobs are started together and take turns at every step (emulation_jobs.py): both ranks real; one real, its delays
emulated in its own process (delay); one real, which exchanges messages with an environment process in the other
namespace (wire). The programs (emulation_workloads.py) are the same, unmodified, and believe to run over gloo. The two
cores share a cache and the memory, which the real ranks fill both; so the other rank does the emulated steps too, at
the same time on the other core, by itself: an emulation of its own, with which nothing is exchanged.

*recipes*: prefill and decode of two language models by four recipes, and training steps of two language models and a
convolutional network under DistributedDataParallel. An emulated step is to come within 3 % of the real one, or within
twice the real launches' own spread (their standard deviation), whichever is larger; and recipes in the right order
wherever they differ by more than the spread.

*added*: the same with all-reduces that end 0.1 to 20 ms later (NeuronaBox, Fig. 4), on real ranks after gloo's,
emulated by `--what-if`. Steps are to grow by as much, within 3 % of the step or twice the spread.

Exit code: 0 where all that holds, 1 where it does not, 2 where it cannot be measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import rewriter as rw
from benchmarks.emulation.jobs import Job
from benchmarks.emulation.workloads import INFERENCE, RECIPES, TRAINING
from benchmarks.overlap.run import weights, write_module
from benchmarks.support.namespaces import Link, LinkError
from rewriter.common.errors import RewriterError

RATE = 100e6  # bytes per second, in each direction: the steps below communicate about as long as they compute
WITHIN = 0.03
KINDS = ("real", "delay", "wire")
BESIDE = "beside"  # the other rank, by itself
ADDED = (0.0, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 2e-2)  # seconds
PORT = 29600


@dataclass
class Step:
    """Medians of one step by launch: seconds, and the share of them that rank 0's process computed."""

    name: str
    seconds: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    busy: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})

    def median(self, kind: str) -> float:
        return statistics.median(self.seconds[kind])

    @property
    def spread(self) -> float:
        """Standard deviation of the real launches, as a share of their median."""
        real = self.seconds["real"]
        return statistics.stdev(real) / self.median("real") if len(real) > 1 else 0.0

    @property
    def limit(self) -> float:
        return max(WITHIN, 2 * self.spread)

    def error(self, kind: str) -> float:
        """Relative, of an emulation's median."""
        return self.median(kind) / self.median("real") - 1

    def holds(self, kind: str) -> bool:
        return abs(self.error(kind)) <= self.limit


class Bench:
    """Modules and a calibrated fabric in a directory, and launches on a link."""

    def __init__(self, directory: Path, link: Link, console: Console) -> None:
        self.directory, self.link, self.console = directory, link, console
        self.fabric = directory / "fabric.yaml"
        self.cores = sorted(os.sched_getaffinity(0))[:2]
        if len(self.cores) < 2:
            raise RewriterError("emulation: it needs two cores, one for each rank; this process may use one")

    def prepare(self, families: Sequence[str], recipes: Sequence[str]) -> None:
        """Emit the modules and write their weights; limit the link."""
        for family in families:
            program = rw.trace(INFERENCE[family])
            full = weights(program)
            (self.directory / family).mkdir()
            for recipe in recipes:
                write_module(self.directory / family, recipe, rw.rewrite(program, RECIPES[recipe], tp=2), full)
        self.link.set_rate(RATE)

    def calibrate(self, quick: bool) -> None:
        """Write the fabric that `rewrite fabrics calibrate` finds between the two namespaces."""
        command = ["-m", "rewriter.cli", "fabrics", "calibrate", "--out", str(self.fabric)]
        command += ["--largest", str(1 << 20), "--repetitions", "5"] if quick else ["--largest", str(32 << 20)]
        job = self._start([command] * 2, "calibration", real=2)
        try:
            job.wait()
        finally:
            job.stop()

    def launch(self, spec: Mapping[str, Any], steps: dict[str, Step], first: int) -> None:
        """One start of all jobs together, and what their ranks 0 measured, into `steps`. Kinds take turns at every
        step; the one that begins is another each time, as it is for another `first`.
        """
        with ExitStack() as stack:
            jobs = {kind: self._job(kind, spec, stack) for kind in (*KINDS, BESIDE)}
            found: dict[str, dict[str, list[float]]] = {}
            names, *_ = [job.connected(server) for job, server in jobs.values()]  # each of them has to come
            beside = jobs[BESIDE][0]
            for repetition in range(-spec["warm_up"], spec["repetitions"]):
                for number, name in enumerate(names):
                    begin = (first + repetition + number) % len(KINDS)
                    for kind in (*KINDS[begin:], *KINDS[:begin]):
                        active = [jobs[kind][0]] if kind == "real" else [jobs[kind][0], beside]
                        for job in active:
                            job.go()
                        told, *_ = [job.told() for job in active]
                        if repetition >= 0:
                            for what, values in told.items():
                                found.setdefault(f"{name}/{kind}", {}).setdefault(what, []).extend(values)
            for job, _ in jobs.values():
                job.wait()
        for name in names:
            step = steps.setdefault(name, Step(name))
            for kind in KINDS:
                step.seconds[kind].append(statistics.median(found[f"{name}/{kind}"]["seconds"]))
                step.busy[kind].append(statistics.median(found[f"{name}/{kind}"]["busy"]))

    def _job(self, kind: str, spec: Mapping[str, Any], stack: ExitStack) -> tuple[Job, socket.socket]:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=self.directory)))
        place = str(directory / "turns")
        server = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        server.bind(place)
        server.listen()
        own = {
            "added": spec["added"] if kind == "real" else 0.0,  # of an emulation, its model adds it
            "turns": place,
            "reporter": int(kind == BESIDE),
            "repetitions": spec["warm_up"] + spec["repetitions"],
            "each": len(KINDS) - 1 if kind == BESIDE else 1,  # beside every emulation
            "directory": str(self.directory),
        }
        given = directory / "spec.json"
        given.write_text(json.dumps({**spec, **own}), encoding="utf-8")
        script = [str(Path(__file__).with_name("workloads.py")), str(given)]
        emulated = ["-m", "rewriter.emulation", "--world-size", "2", "--real", str(own["reporter"])]
        emulated += ["--fabric", str(self.fabric), "--mode", "wire" if kind == "wire" else "delay"]
        if spec["added"]:
            emulated += ["--what-if", f"all_reduce=+{spec['added'] * 1e6:g}us"]
        match kind:
            case "real":
                job = self._start([script, script], kind, real=2)
            case "wire":
                served = f"10.0.0.2:{PORT + Job.number % 100}"
                commands = [[*emulated, "--environment", served, *script], [*emulated, "--serve", served]]
                job = self._start(commands, kind, real=1)
            case _:
                job = self._start([[*emulated, *script]], kind, real=1, end=int(kind == BESIDE))
        stack.callback(job.stop)
        return job, server

    def _start(self, commands: Sequence[Sequence[str]], what: str, real: int, end: int = 0) -> Job:
        return Job(self.link, self.cores, commands, what, real, end)


def compared(bench: Bench, spec: Mapping[str, Any], launches: int) -> list[Step]:
    """Launches of all kinds together."""
    steps: dict[str, Step] = {}
    for number in range(launches):
        bench.launch(spec, steps, number)
        bench.console.print(f"launch {number + 1} of {launches}: {time.strftime('%H:%M:%S')}")
    return list(steps.values())


def misordered(steps: Sequence[Step], kind: str) -> list[str]:
    """Pairs of recipes of one model and phase that the emulation puts in another order than the real ranks do."""
    wrong = []
    for a, b in combinations([s for s in steps if not s.name.endswith(" step")], 2):
        if a.name.rpartition(" ")[0] != b.name.rpartition(" ")[0]:
            continue
        real = a.median("real") - b.median("real")
        if abs(real) <= max(a.spread, b.spread) * max(a.median("real"), b.median("real")):
            continue
        if real * (a.median(kind) - b.median(kind)) <= 0:
            wrong.append(f"{a.name} and {b.name.rpartition(' ')[2]}")
    return wrong


def table(title: str, steps: Sequence[Step], kinds: Sequence[str]) -> Table:
    shown = Table(title=title)
    shown.add_column("step")
    for column in ("real, ms", "spread", *(f"{kind}, ms" for kind in kinds), *(f"{kind}, error" for kind in kinds)):
        shown.add_column(column, justify="right")
    shown.add_column("CPU " + " / ".join(("real", *kinds)), justify="right")
    for step in steps:
        shown.add_row(
            step.name,
            f"{step.median('real') * 1e3:.2f}",
            f"{step.spread:.1%}",
            *(f"{step.median(kind) * 1e3:.2f}" for kind in kinds),
            *(f"{step.error(kind):+.1%}{'' if step.holds(kind) else ' !'}" for kind in kinds),
            " / ".join(f"{statistics.median(step.busy[kind]):.0%}" for kind in ("real", *kinds)),
        )
    return shown


def recipes_part(bench: Bench, options: argparse.Namespace, found: dict[str, Any]) -> bool:
    """Prefill, decode and training steps. True where everything holds."""
    families, recipes = (["llama"], ["standard", "ladder"]) if options.quick else (list(INFERENCE), list(RECIPES))
    spec = {
        "inference": [f"{family}/{recipe}" for family in families for recipe in recipes],
        "phases": ["prefill", "decode"],
        "training": ["resnet"] if options.quick else list(TRAINING),
        "added": 0.0, "warm_up": 2, "repetitions": 2 if options.quick else 7, "decodes": 5,
    }  # fmt: skip
    steps = compared(bench, spec, 1 if options.quick else options.launches)
    bench.console.print(table("steps on 2 ranks, real and emulated", steps, KINDS[1:]))
    found["recipes"] = [asdict(step) | {"spread": step.spread} for step in steps]
    good = True
    for kind in KINDS[1:]:
        missed = [step.name for step in steps if not step.holds(kind)]
        wrong = misordered(steps, kind)
        bench.console.print(
            f"{kind}: {len(steps) - len(missed)} of {len(steps)} steps within {WITHIN:.0%} or twice the spread, "
            f"median error {statistics.median(abs(step.error(kind)) for step in steps):.1%}; recipes in another order: "
            f"{'; '.join(wrong) or 'none'}"
        )
        good = good and not missed and not wrong
    return good


def added_part(bench: Bench, options: argparse.Namespace, found: dict[str, Any]) -> bool:
    """Steps with all-reduces that end later: by how much they are longer than without, real and emulated."""
    curves: dict[float, list[Step]] = {}
    for added in (ADDED[0], ADDED[5]) if options.quick else ADDED:
        spec = {
            "inference": ["llama/standard", "llama/ladder"], "phases": ["prefill"], "training": ["llama"],
            "added": added, "warm_up": 2, "repetitions": 2 if options.quick else 7, "decodes": 1,
        }  # fmt: skip
        curves[added] = compared(bench, spec, 1 if options.quick else max(2, options.launches // 2))
    found["added"] = {
        f"{added:g}": [asdict(step) | {"spread": step.spread} for step in steps] for added, steps in curves.items()
    }
    shown = Table(title="steps longer by what is added to every all-reduce, ms")
    for column in ("step", "added", "real", "real, longer by", *(f"{kind}, longer by" for kind in KINDS[1:])):
        shown.add_column(column, justify="left" if column == "step" else "right")
    good = True
    for number, before in enumerate(curves[0.0]):
        for added, steps in curves.items():
            step = steps[number]
            longer = {kind: step.median(kind) - before.median(kind) for kind in KINDS}
            # of the step that is longer, as for its own duration
            off = {kind: abs(longer[kind] - longer["real"]) / step.median("real") for kind in KINDS}
            limit = max(WITHIN, 2 * step.spread, 2 * before.spread)
            cells = [f"{longer[kind] * 1e3:+.1f}{' !' if off[kind] > limit else ''}" for kind in KINDS]
            shown.add_row(step.name, f"{added * 1e3:g}", f"{step.median('real') * 1e3:.1f} ± {step.spread:.1%}", *cells)
            good = good and max(off.values()) <= limit
        shown.add_section()
    bench.console.print(shown)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description="Whole steps, emulated against real.")
    parser.add_argument("--part", choices=("recipes", "added", "all"), default="all")
    parser.add_argument("--launches", type=int, default=5, help="starts of each kind (default 5)")
    parser.add_argument("--fabric", type=Path, metavar="FILE", help="calibrate into this file, or take what it has")
    parser.add_argument("--quick", action="store_true", help="one launch of few steps: does it run? No verdict")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    console = Console(highlight=False, width=160)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the namespaces go away
    torch.manual_seed(0)
    found: dict[str, Any] = {"rate": RATE}
    good = True
    try:
        with tempfile.TemporaryDirectory(prefix="emulation-") as name, Link() as link:
            bench = Bench(Path(name), link, console)
            bench.prepare(["llama"] if options.quick else list(INFERENCE), list(RECIPES))
            if options.fabric is not None and options.fabric.exists():
                shutil.copy(options.fabric, bench.fabric)
            else:
                bench.calibrate(options.quick)
                if options.fabric is not None:
                    shutil.copy(bench.fabric, options.fabric)
            if options.part in ("recipes", "all"):
                good = recipes_part(bench, options, found) and good
            if options.part in ("added", "all"):
                good = added_part(bench, options, found) and good
    except (LinkError, RewriterError) as error:
        console.print(f"error: {error}", style="red", markup=False)
        return 2
    if options.json:
        options.json.write_text(json.dumps(found, indent=2), encoding="utf-8")
    return 0 if good or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())

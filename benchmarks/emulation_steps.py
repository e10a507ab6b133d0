"""Whole steps, emulated against real: two gloo ranks in network namespaces, and one of them with the other emulated.

    sudo python benchmarks/emulation_steps.py [--part recipes|added|all] [--fabric FILE] [--quick] [--json FILE]

Each rank has one core and a namespace of its own; a rate-limited pair of interfaces joins them. The delays of the
emulation are those that `rewrite fabrics calibrate` measures between the two namespaces, of collectives alone: no step
is calibrated on. `--fabric` keeps them in a file, and takes them from it where it exists: seven minutes less. Then
launches take turns: both ranks real; one real, its delays emulated in its own process (delay); one real, which
exchanges messages with an environment process in the other namespace (wire). The programs (emulation_workloads.py) are
the same, unmodified, and believe to run over gloo.

*recipes*: prefill and decode of two language models by four recipes, and training steps of two language models and a
convolutional network under DistributedDataParallel. An emulated step is to come within 3 % of the real one, or within
twice the real launches' own spread (their standard deviation), whichever is larger; and recipes in the right order
wherever they differ by more than the spread.

*added*: the same with all-reduces that end 0.1 to 20 ms later (NeuronaBox, Fig. 4), on real ranks by a timer behind
gloo's, emulated by `--what-if`.

Exit code: 0 where all that holds, 1 where it does not, 2 where it cannot be measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from emulation_workloads import INFERENCE, RECIPES, TRAINING
from namespaces import INTERFACE, Link, LinkError
from overlap import weights, write_module
from rich.console import Console
from rich.table import Table

import rewriter as rw
from rewriter.errors import RewriterError

HERE = Path(__file__).resolve().parent
RATE = 100e6  # bytes per second, in each direction: the steps below communicate about as long as they compute
WITHIN = 0.03
SECONDS = 600.0
KINDS = ("real", "delay", "wire")
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
        self.launched = 0

    def prepare(self, families: Sequence[str], recipes: Sequence[str]) -> None:
        """Emit the modules, write their weights, and measure collectives between the namespaces."""
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
        self._run([command] * 2, "calibration", real=2)

    def launch(self, kind: str, spec: Mapping[str, Any]) -> dict[str, Any]:
        """One start of everything: what rank 0 measured."""
        with tempfile.TemporaryDirectory(dir=self.directory) as name:
            given, found = Path(name, "spec.json"), Path(name, "result.json")
            given.write_text(json.dumps({**spec, "directory": str(self.directory)}), encoding="utf-8")
            script = [str(HERE / "emulation_workloads.py"), str(given), str(found)]
            if kind == "real":
                self._run([script, script], kind, real=2)
            else:
                emulated = ["-m", "rewriter.runtime.emulated", "--world-size", "2", "--real", "0"]
                emulated += ["--fabric", str(self.fabric), "--mode", kind]
                if spec["added"]:
                    emulated += ["--what-if", f"all_reduce=+{spec['added'] * 1e6:g}us"]
                if kind == "delay":
                    self._run([[*emulated, *script]], kind, real=1)
                else:
                    place = f"10.0.0.2:{PORT + self.launched % 100}"
                    served = [*emulated, "--serve", place]
                    self._run([[*emulated, "--environment", place, *script], served], kind, real=1)
            result: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
        return result

    def _run(self, commands: Sequence[Sequence[str]], what: str, real: int) -> None:
        """Run a Python command at each end, on a core of its own, until the first `real` of them have ended."""
        self.launched += 1
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": str(PORT + 100 + self.launched % 100),
            "WORLD_SIZE": str(real),
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }
        processes, logs = [], [self.directory / f"log-{end}" for end in range(len(commands))]
        for end, command in enumerate(commands):
            # taskset before Python: gloo's own threads, and torch's, inherit it
            words = [*self.link.inside(end), "taskset", "-c", str(self.cores[end]), sys.executable, *command]
            own = {"RANK": str(end), "LOCAL_RANK": "0"} if real > 1 else {}
            with logs[end].open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        words, env={**environment, **own}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                    )
                )
        deadline = time.monotonic() + SECONDS
        try:
            while any(process.poll() is None for process in processes[:real]):
                if any(process.poll() for process in processes) or time.monotonic() > deadline:
                    break
                time.sleep(0.05)
            status = [process.poll() for process in processes[:real]]
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        if any(code != 0 for code in status):
            said = "\n".join(
                f"end {end}: {log.read_text(errors='replace').strip()[-2500:]}" for end, log in enumerate(logs)
            )
            raise RewriterError(f"emulation: {what} ended with {status}:\n{said}")


def compared(bench: Bench, spec: Mapping[str, Any], launches: int, kinds: Sequence[str]) -> list[Step]:
    """Launches of all kinds in turns."""
    steps: dict[str, Step] = {}
    for number in range(launches):
        turned = list(kinds[number % len(kinds) :]) + list(kinds[: number % len(kinds)])
        for kind in turned:
            result = bench.launch(kind, spec)
            for name, seconds in result["seconds"].items():
                step = steps.setdefault(name, Step(name))
                step.seconds[kind].append(seconds)
                step.busy[kind].append(result["busy"][name])
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
    steps = compared(bench, spec, 1 if options.quick else options.launches, KINDS)
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
    """Steps with all-reduces that end later."""
    good, curves = True, {}
    for added in (ADDED[0], ADDED[3], ADDED[5]) if options.quick else ADDED:
        spec = {
            "inference": ["llama/standard", "llama/ladder"], "phases": ["prefill"], "training": ["llama"],
            "added": added, "warm_up": 2, "repetitions": 2 if options.quick else 7, "decodes": 1,
        }  # fmt: skip
        steps = compared(bench, spec, 1 if options.quick else max(2, options.launches // 2), KINDS)
        curves[f"{added:g}"] = [asdict(step) | {"spread": step.spread} for step in steps]
        bench.console.print(table(f"all-reduces end {added * 1e3:g} ms later", steps, KINDS[1:]))
        good = good and all(step.holds(kind) for step in steps for kind in KINDS[1:])
    found["added"] = curves
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

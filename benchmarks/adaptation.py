"""How well rewritten models heal: trains the shipped tiny model under every wiring and writes docs/ADAPTATION.md.

    python benchmarks/adaptation.py            # the core, within an hour of two cores
    python benchmarks/adaptation.py --full     # every recipe that approximates, and models from scratch
    python benchmarks/adaptation.py --quick --out build/quick.md    # seconds: whether it runs; its figures say nothing

Every training is a process of one thread, one process per core. Results are kept in build/adaptation, a file each: the
same command goes on where it was cut off, and --full takes what the core has found. The page is written when nothing is
missing; where the text of adaptation.md claims what the figures do not bear out, it is not written, and the exit code
is 1. It is 3 when a training fails.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue

from adaptation_page import figures, page, unsupported
from adaptation_runs import RANKS, STANDARD, Result, Run, Settings, Store, core, full, quick

from rewriter.api import convert
from rewriter.common.processes import Processes, environment

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "examples" / "tiny-llama"
CORPUS = ROOT / "examples" / "tiny_corpus.py"
PAGE = ROOT / "docs" / "ADAPTATION.md"


class TrainingError(Exception):
    """A training failed; the message has its last words."""


def origin() -> str:
    """What the figures rest on beside run and settings: the weights, the rule of the corpus, the Python that has it."""
    digest = hashlib.sha256((MODEL / "model.safetensors").read_bytes() + CORPUS.read_bytes())
    return f"{digest.hexdigest()} {sys.version.split()[0]}"


def converted(recipe: str, store: Store) -> Path:
    """The tiny model rewritten by `recipe`, made where it is not there yet."""
    out = store.directory / f"{recipe}-tp{RANKS}-{hashlib.sha256(store.origin.encode()).hexdigest()[:8]}"
    if not out.exists():
        convert(MODEL, recipe, tp=RANKS, out=out, verify="none")
    return out


def train(run: Run, store: Store, directories: dict[str, Path], core_of: SimpleQueue[int]) -> Result:
    """One run in a process of its own, on a core that no other has."""
    here = Path(__file__).resolve().parent
    spec = {
        "run": asdict(run),
        "settings": asdict(store.settings),
        "student": str(directories[run.recipe]),
        "corpus": str(CORPUS.parent),
    }
    variables = environment(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    number = core_of.get()
    try:
        with Processes() as job:
            given, found = job.scratch / "spec.json", job.scratch / "result.json"
            given.write_text(json.dumps(spec), encoding="utf-8")
            command = [sys.executable, str(here / "adaptation_train.py"), str(given), str(found)]
            process = job.start("training", command, variables)
            if hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(process.pid, {number})
            if failure := job.wait():
                raise TrainingError(f"{run.name}:\n{failure.details}")
            return Result(**json.loads(found.read_text(encoding="utf-8")))
    finally:
        core_of.put(number)


def train_all(runs: Sequence[Run], store: Store) -> None:
    """Every run that has no result yet, as many side by side as there are cores, two at most; in the given order."""
    missing = store.missing(runs)
    if not missing:
        return
    directories = {recipe: converted(recipe, store) for recipe in sorted({STANDARD, *(run.recipe for run in missing)})}
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0, 1]
    free: SimpleQueue[int] = SimpleQueue()
    for number in cores[:2]:
        free.put(number)
    begin = time.monotonic()
    with ThreadPoolExecutor(len(cores[:2])) as pool:
        waiting: dict[Future[Result], Run] = {pool.submit(train, run, store, directories, free): run for run in missing}
        try:
            while waiting:
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    run = waiting.pop(future)
                    result = future.result()
                    store.put(run, result)
                    speed = f", {run.tokens / result.seconds:,.0f} tokens/s" if run.tokens else ""
                    minutes = (time.monotonic() - begin) / 60
                    print(f"{minutes:5.1f} min  {run.name}: {result.loss:.4f}{speed}", file=sys.stderr, flush=True)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="every approximating recipe, and models from scratch")
    parser.add_argument("--quick", action="store_true", help="two steps of one recipe, to see whether everything runs")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "adaptation", help="where results are kept")
    parser.add_argument("--out", type=Path, help="the page (docs/ADAPTATION.md)")
    arguments = parser.parse_args()
    if arguments.quick and arguments.out is None:
        parser.error("--quick needs --out: its figures say nothing, and docs/ADAPTATION.md is not for them")
    settings = Settings()
    runs, settings = quick(settings) if arguments.quick else ((full if arguments.full else core)(settings), settings)
    store = Store(arguments.results, settings, origin())
    try:
        train_all(runs, store)
    except TrainingError as error:
        print(error, file=sys.stderr)
        return 3
    results = {run: result for run in runs if (result := store.get(run)) is not None}
    if not arguments.quick and (wrong := unsupported(results)):
        print(f"not borne out by the figures: {'; '.join(wrong)}. Correct adaptation.md.", file=sys.stderr)
        return 1
    out = arguments.out or PAGE
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(results, settings, "--full" if arguments.full else ""), encoding="utf-8")
    for name, svg in figures(results).items():
        (out.parent / "figures").mkdir(exist_ok=True)
        (out.parent / "figures" / name).write_text(svg, encoding="utf-8")
    print(f"wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

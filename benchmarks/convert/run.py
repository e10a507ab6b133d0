"""What converting a checkpoint costs beside copying and reading it: seconds, memory, and bytes on the disk.

    python -m benchmarks.convert.run [--gigabytes 4] [--rounds 5] [--dir DIR] [--verify] [--json]
    python -m benchmarks.convert.run --model DIR --tp 3 --rounds 1

Writes a Llama of random bf16 weights in several safetensors files, or takes the model in DIR. Then alternates: `cp` to
a fresh directory, with every file on the disk at the end; reading and hashing every file once, with a thread per core;
a conversion (recipe ladder-upper-half, tp 8, no verification) and one with --link, each in a process of its own,
Python's start, imports and tracing included; and a conversion that writes nothing (--dry-run), which is that start.
After every conversion it recomputes hashes of the manifest and compares what a rank reads with the source. `--verify`
adds one conversion with default verification, of which a person pays the rest.

Exit code: 1 if a file is not what it should be or a limit is exceeded: see LIMITS; those of time are for 4 GB, since a
start takes as long for a small model. DIR needs three times the size;
everything written there is deleted at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.support.process_tree import Usage, run
from benchmarks.support.random_checkpoint import make
from rewriter.weights import Checkpoint
from rewriter.weights.references import RankWeights

RECIPE = "ladder-upper-half"
READING = 1.5  # times the time of reading, of which --link may take as much, and LINK_SECONDS for the start
LINK_SECONDS = 6.0
LIMITS = {
    "convert ÷ cp": 1.2,
    "--link ÷ (6 s + 1.5 × reading)": 1.0,
    "resident, GB": 0.8,
    "written ÷ source": 1.02,
    "written with --link, MB": 20.0,
}
CONVERT = (
    "import sys, json; from rewriter.api import SaveOptions, convert; source, recipe, out, tp, options = sys.argv[1:]; "
    "convert(source, recipe, out=out, tp=int(tp), options=SaveOptions(**json.loads(options)))"
)


@dataclass(frozen=True)
class Round:
    """Seconds of one copy, one reading, conversions and the start alone; bytes that both outputs take."""

    copy: float
    reading: float
    start: float
    converted: Usage
    linked: Usage
    source: int
    written: int
    written_linked: int

    def figures(self) -> dict[str, float]:
        """By name, in the order in which a person reads them; those of LIMITS among them."""
        return {
            "cp + fsync, s": self.copy,
            "reading and hashing, s": self.reading,
            "start (--dry-run), s": self.start,
            "convert, s": self.converted.seconds,
            "convert --link, s": self.linked.seconds,
            "convert ÷ cp": self.converted.seconds / self.copy,
            "--link ÷ reading": self.linked.seconds / self.reading,
            "--link ÷ (6 s + 1.5 × reading)": self.linked.seconds / (LINK_SECONDS + READING * self.reading),
            "resident, GB": max(self.converted.resident, self.linked.resident) / 1e9,
            "written ÷ source": self.written / self.source,
            "written with --link, MB": self.written_linked / 1e6,
        }


def timed_copy(source: Path, out: Path) -> float:
    """Seconds for `cp` of every file and fsync of each."""
    begin = time.perf_counter()
    # A copy that shares its blocks would cost nothing and say nothing about the disk.
    subprocess.run(["cp", "--recursive", "--reflink=never", str(source), str(out)], check=True)
    subprocess.run(["sync", *map(str, [*sorted(out.iterdir()), out])], check=True)
    return time.perf_counter() - begin


def timed_reading(source: Path) -> float:
    """Seconds in which every weight file is read and hashed once, by as many threads as there are cores."""

    def sha256(path: Path) -> str:
        with path.open("rb", buffering=0) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    begin = time.perf_counter()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(sha256, sorted(source.glob("*.safetensors"))))
    return time.perf_counter() - begin


def converted(source: Path, out: Path, tp: int, **options: object) -> Usage:
    """A conversion in a process of its own, from its start to its end."""
    return run(CONVERT, source, RECIPE, out, str(tp), json.dumps({"verify": "none", **options}))


def taken(directory: Path, beside: Path | None = None) -> int:
    """Bytes of the files of a directory, without those that are files of `beside`."""
    shared = {path.stat().st_ino for path in beside.iterdir()} if beside is not None else set()
    files = [path.stat() for path in directory.rglob("*") if path.is_file()]
    return sum(status.st_size for status in files if status.st_ino not in shared)


def faults(source: Path, out: Path, tp: int, number: int) -> Iterator[str]:
    """What is wrong with an output: hashes of a sample of files, another in every round, and what a rank reads."""
    manifest = json.loads((out / "rewrite.json").read_text())
    weights = sorted(name for name in manifest["files"] if name.endswith(".safetensors"))
    for name in ["config.json", weights[number % len(weights)]]:
        with (out / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != manifest["files"][name]:
                yield f"{name} does not have the hash that the manifest says"
    whole = Checkpoint.open(source)
    (mesh,) = manifest["runtime"].values()
    rank = number % tp
    part = RankWeights.open(out, out / mesh["weights"], rank)
    for name, dim in (("model.embed_tokens.weight", 0), ("model.layers.0.mlp.down_proj.weight", 1)):
        full = whole.read(name)
        size = full.shape[dim] // tp
        found = part.read({name: None}, "cpu")[name]
        if not found.equal(full.narrow(dim, rank * size, size)):
            yield f"{name} of rank {rank} is not its part of the source's"


def measure(
    source: Path, root: Path, tp: int, rounds: int, console: Console
) -> tuple[list[dict[str, float]], list[str]]:
    """Alternate what is compared; also returns everything that was wrong with an output."""
    found: list[dict[str, float]] = []
    wrong: list[str] = []
    size = taken(source)
    out = root / "out"

    def fresh() -> None:
        shutil.rmtree(out)
        os.sync()

    for number in range(rounds):
        copy = timed_copy(source, out)
        fresh()
        plain = converted(source, out, tp)
        wrong += faults(source, out, tp, number)
        written = taken(out)
        fresh()
        reading = timed_reading(source)
        linked = converted(source, out, tp, link=True)
        wrong += faults(source, out, tp, number)
        written_linked = taken(out, source)
        fresh()
        start = converted(source, out, tp, dry_run=True).seconds
        found.append(Round(copy, reading, start, plain, linked, size, written, written_linked).figures())
        shown = ", ".join(f"{name} {value:.2f}" for name, value in found[-1].items())
        console.print(f"round {number + 1}: {shown}")
    return found, wrong


def table(rounds: Sequence[dict[str, float]], tp: int) -> Table:
    """What a person reads."""
    shown = Table(title=f"conversion, recipe {RECIPE}, tp {tp}")
    for column in ("", "median", "range", "limit"):
        shown.add_column(column, justify="right" if column else "left")
    for name in rounds[0]:
        values = [figures[name] for figures in rounds]
        limit = f"{LIMITS[name]}" if name in LIMITS else ""
        shown.add_row(name, f"{statistics.median(values):.3f}", f"{min(values):.3f} – {max(values):.3f}", limit)
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description="What converting a checkpoint costs beside copying and reading it.")
    parser.add_argument("--gigabytes", type=float, default=4, help="size of the checkpoint (default 4)")
    parser.add_argument("--model", type=Path, default=None, help="a checkpoint to take in place of one that is made")
    parser.add_argument("--tp", type=int, default=8, help="ranks (default 8)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured (default 5)")
    parser.add_argument("--dir", type=Path, default=None, help="where to write (default: the system's temporary files)")
    parser.add_argument("--verify", action="store_true", help="measure default verification too, once")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, progress goes to stderr")
    options = parser.parse_args()
    console = Console(stderr=options.json, highlight=False)
    with tempfile.TemporaryDirectory(prefix="convert-", dir=options.dir) as name:
        root = Path(name)
        source = options.model or root / "source"
        if options.model is None:
            source.mkdir()
            make(source, options.gigabytes)
        rounds, wrong = measure(source, root, options.tp, options.rounds, console)
        if options.verify:
            used = converted(source, root / "verified", options.tp, link=True, verify="shrunken")
            shown = f"{used.seconds:.1f} s, {used.resident / 1e9:.2f} GB resident in all processes"
            console.print(f"verified, --link: {shown}")
    for figure, limit in LIMITS.items():
        median = statistics.median(figures[figure] for figures in rounds)
        if median > limit and (options.model is None or ("÷ cp" not in figure and "reading" not in figure)):
            wrong.append(f"{figure}: {median:.3f}, limit {limit}")
    if options.json:
        print(json.dumps({"rounds": rounds, "limits": LIMITS, "faults": wrong}, indent=2, ensure_ascii=False))
    else:
        console.print(table(rounds, options.tp))
    for fault in wrong:
        console.print(f"FAILED: {fault}", style="red")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

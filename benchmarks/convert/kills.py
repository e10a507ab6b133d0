"""Is a conversion that is killed at any moment resumed to the same files? Many times SIGKILL, at random moments.

    python -m benchmarks.convert.kills [--kills 200] [--seed 0] [--dir DIR] [--json]

Converts a small random Llama in several ways (copies, links, a file per rank, another dtype, two degrees), without
verification, each in a process group of its own, forked when everything is imported. Half of the kills fall anywhere in
the run, the others after the first byte is on the disk. What was interrupted is mostly resumed, and killed again;
sometimes it is started over. A run that comes to its end has to leave exactly the files of an undisturbed run, with
their sha256, and nothing beside them; one that refuses has to name what to delete. Exit code: 1 where one does neither.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.support.random_checkpoint import Sizes, make
from rewriter.convert.save_options import SaveOptions

SIZES = Sizes(hidden=1024, feed_forward=4096, heads=16, kv_heads=8, head=64, vocabulary=8000, file_bytes=4e7)
GIGABYTES = 0.1
WAYS: Mapping[str, tuple[list[int], SaveOptions]] = {
    "copies": ([2], SaveOptions(verify="none")),
    "links": ([2], SaveOptions(verify="none", link=True)),
    "a file per rank": ([2], SaveOptions(verify="none", materialize=True)),
    "fp16": ([2], SaveOptions(verify="none", dtype="fp16")),
    "two degrees": ([2, 4], SaveOptions(verify="none")),
}
RESUMED = 0.8  # of the runs after a kill; the others start over


def renew_thread_pool() -> None:
    """In a forked process, before it has threads: torch renews the pool that a fork loses when it is first asked for,
    and two threads that ask at once find none ("Invalid thread pool")."""
    torch.set_num_threads(torch.get_num_threads())


@dataclass
class Way:
    """One way of converting, at a place of its own: what an undisturbed run leaves, and how long it takes."""

    name: str
    source: Path
    place: Path
    tp: list[int]
    options: SaveOptions
    expected: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0  # of a whole run
    writing: float = 0.0  # of it, since the first byte

    @property
    def out(self) -> Path:
        return self.place / "out"

    @property
    def messages(self) -> Path:
        """What the last run wrote to its standard error."""
        return self.place.with_name(f"{self.place.name}.messages")

    def start(self, resume: bool) -> int:
        """The process id, and group, of a conversion that has begun."""
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            os.setsid()
            renew_thread_pool()
            with self.messages.open("w") as messages:
                os.dup2(messages.fileno(), 2)
            code = self.work(resume)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)

    def work(self, resume: bool) -> int:
        """What the process does, and its exit code."""
        from rewriter.api import convert

        options = replace(self.options, resume=resume)
        convert(self.source, "tensor-parallel", out=self.out, tp=self.tp, options=options)
        return 0

    def left(self) -> dict[str, str]:
        """Every file at the place and its sha256; a hidden one is what something left behind."""
        files = [path for path in sorted(self.place.rglob("*")) if path.is_file()]
        return {str(path.relative_to(self.place)): sha256(path) for path in files}

    def undisturbed(self) -> None:
        """Convert twice: the first run is slow, and both have to give the same."""
        for _ in range(2):
            self.clear()
            begin = time.monotonic()
            pid = self.start(resume=False)
            while not any(self.place.iterdir()):
                time.sleep(0.001)
            first = time.monotonic()
            if code := ended(pid):
                raise RuntimeError(f"{self.name}: exit code {code}: {self.message()}")
            self.seconds, self.writing = time.monotonic() - begin, time.monotonic() - first
            found = self.left()
            if self.expected and found != self.expected:
                raise RuntimeError(f"{self.name}: two undisturbed runs differ in {differing(found, self.expected)}")
            self.expected = found
        self.clear()

    def clear(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir()

    def message(self) -> str:
        return self.messages.read_text().strip()


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def differing(found: Mapping[str, str], expected: Mapping[str, str]) -> str:
    return ", ".join(sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name)))


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed(pid: int, over: Callable[[], float | None]) -> int | None:
    """Kill a group once `over()` seconds have passed (None: not yet known); the exit code if it ended before."""
    deadline: float | None = None
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if deadline is None and (wait := over()) is not None:
            deadline = time.monotonic() + wait
        if deadline is not None and time.monotonic() >= deadline:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(0.0005)


def state(way: Way) -> str:
    """What a kill left, in words."""
    if way.out.exists():
        return "complete" if way.left() == way.expected else "complete, with something beside it"
    if not any(way.place.iterdir()):
        return "nothing"
    journal = way.place / ".out.rewriting.journal"
    lines = len(journal.read_bytes().splitlines()) if journal.exists() else 0
    return "begun" if lines <= 1 else "some files finished"


def attempt(way: Way, generator: random.Random, counts: Counter[str], anywhere: bool) -> bool:
    """One run that is killed, if it lives so long; whether it was. Raises AssertionError where its end is wrong."""
    resume = bool(way.left()) and generator.random() < RESUMED
    pid = way.start(resume)
    wait = generator.uniform(0, way.seconds if anywhere else way.writing)
    if anywhere:
        code = killed(pid, lambda: wait)
    else:
        code = killed(pid, lambda: wait if any(way.place.iterdir()) else None)
    if code is None:
        counts[f"killed, leaving: {state(way)}"] += 1
        return True
    check(way, code, counts)
    return False


def check(way: Way, code: int, counts: Counter[str]) -> None:
    """A run has ended by itself: with all that is expected, or a message that says what to delete."""
    if code == 0:
        found = way.left()
        assert found == way.expected, f"{way.name}: not as undisturbed: {differing(found, way.expected)}"
        counts["came to the same files"] += 1
    else:
        message = way.message()
        told = "delete" in message and str(way.place) in message
        assert told, f"{way.name}: exit code {code}: {message}"
        counts["said what to delete"] += 1
    way.clear()


def soak(ways: list[Way], kills: int, seed: int) -> Counter[str]:
    """Kill so many times, the ways in turn, then let each come to its end."""
    generator, counts = random.Random(seed), Counter[str]()
    number = 0
    while number < kills:
        way = ways[number % len(ways)]
        number += attempt(way, generator, counts, anywhere=number // len(ways) % 2 == 0)
    for way in ways:
        check(way, ended(way.start(resume=True)), counts)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description="Conversions that are killed at random moments, and resumed.")
    parser.add_argument("--kills", type=int, default=200, help="how many (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default 0)")
    parser.add_argument("--dir", type=Path, default=None, help="where to write (default: the system's temporary files)")
    parser.add_argument("--json", action="store_true", help="print counts as JSON")
    options = parser.parse_args()
    console = Console(stderr=options.json, highlight=False)
    import rewriter.convert.conversion  # noqa: F401  so that forked processes need not

    with tempfile.TemporaryDirectory(prefix="kills-", dir=options.dir) as root:
        source = Path(root, "source")
        source.mkdir()
        make(source, GIGABYTES, SIZES)
        ways = [Way(name, source, Path(root, f"way{i}"), *given) for i, (name, given) in enumerate(WAYS.items())]
        for way in ways:
            way.undisturbed()
            console.print(f"{way.name}: {len(way.expected)} files in {way.seconds:.1f} s, {way.writing:.2f} of writing")
        counts = soak(ways, options.kills, options.seed)
    if options.json:
        print(json.dumps(counts, indent=2))
    for what, count in sorted(counts.items()):
        console.print(f"{count:5} {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What a case of the soak is, and how one is run: in a process of its own, with a limit of time."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

COMMAND = "PYTHONPATH=tools:tests/support:tests:. .venv/bin/python -m soak --repeat"


@dataclass
class Outcome:
    """What a case has seen: how often each thing happened, and what is wrong, in words."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Kind:
    """A kind of case. `prepare` makes what its cases share, in a directory that only they write; `run` is one case.

    `share`: its part of the time. `limit`: the seconds after which a case is stopped, which is a failure. `needs`: why
    this machine cannot run it, else nothing. `beside`: another kind whose place it has, prepared alike.
    """

    name: str
    share: float
    limit: float
    prepare: Callable[[Path], None]
    run: Callable[[int, Path], Outcome]
    needs: Callable[[], str] = lambda: ""
    beside: str = ""


def generator(kind: str, index: int) -> random.Random:
    """The random numbers of a case."""
    return random.Random(f"{kind} {index}")


def run_case(kind: Kind, index: int, place: Path) -> Outcome:
    """The outcome of a case. That it raises, dies or takes too long is a failure too; none of its processes is left."""

    def case() -> Outcome:
        return kind.run(index, place)

    found = in_process(case, place.with_name(f"{place.name}.outcome"), kind.limit)
    return found if isinstance(found, Outcome) else Outcome(failures=[found])


def prepared(kind: Kind, place: Path) -> Path:
    """The place of a kind, made anew. Raises RuntimeError where that fails."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)

    def prepare() -> Outcome:
        kind.prepare(place)
        return Outcome()

    found = in_process(prepare, place.with_name(f"{place.name}.outcome"), 10 * kind.limit)
    if not isinstance(found, Outcome):
        raise RuntimeError(f"{kind.name} cannot be prepared: {found}")
    return place


def in_process(work: Callable[[], Outcome], file: Path, limit: float) -> Outcome | str:
    """What `work` gives in a forked process and group of its own; in words, how it failed."""
    file.unlink(missing_ok=True)
    pid = os.fork()
    if not pid:
        _child(work, file)
    deadline = time.monotonic() + limit
    try:
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                return f"it did not end in {limit:g} s"
            time.sleep(0.002)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    if not file.exists():
        return f"its process ended with {os.waitstatus_to_exitcode(ended[1])} and said nothing"
    data = json.loads(file.read_text(encoding="utf-8"))
    file.unlink()
    return str(data["raised"]) if data["raised"] else Outcome(Counter(data["counts"]), data["failures"])


def _child(work: Callable[[], Outcome], file: Path) -> None:
    """Ends the process, whatever happens in `work`."""
    try:
        os.setsid()
        torch.set_num_threads(torch.get_num_threads())  # as in `kills.renew_thread_pool`
        outcome, raised = Outcome(), ""
        try:
            outcome = work()
        except BaseException:
            raised = traceback.format_exc()
        keep(outcome, file, raised)
    finally:
        os._exit(0)


def keep(outcome: Outcome, file: Path, raised: str = "") -> None:
    """Write an outcome for the process that waits for it in `in_process`."""
    data = {"counts": outcome.counts, "failures": outcome.failures, "raised": raised}
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(json.dumps(data), encoding="utf-8")
    partial.replace(file)

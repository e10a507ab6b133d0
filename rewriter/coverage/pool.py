"""A process per type, so that one that hangs, crashes or takes all memory costs its own row and nothing else."""

from __future__ import annotations

import multiprocessing as mp
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from rewriter.coverage.coverage_row import Coverage, explain

Check = Callable[[str], Coverage]
"""Everything about one type; must be importable by name in another process."""

# What every check imports. The processes are forked from one that has it already, which costs milliseconds.
PRELOADED = ("rewriter.coverage.check", "transformers.models.auto.modeling_auto")


@dataclass
class _Running:
    type: str
    process: Any  # BaseProcess of the start method of the platform
    begin: float


def run(types: Sequence[str], check: Check, *, jobs: int = 1, limit: float = 120.0) -> Iterator[Coverage]:
    """The rows of `types` as they become ready, `jobs` at a time, each stopped after `limit` seconds.

    A process that dies or is stopped gives a row that says so. Leaves no process behind.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    waiting = list(reversed(types))
    running: dict[Connection, _Running] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                name = waiting.pop()
                receive, send = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(check, name, send), daemon=True)
                process.start()
                send.close()
                running[receive] = _Running(name, process, time.monotonic())
            for receive in _ready(running, limit):
                yield _finish(receive, running.pop(receive), limit)
    finally:
        for job in running.values():
            job.process.kill()
            job.process.join()


def _work(check: Check, name: str, send: Connection) -> None:
    try:
        result = check(name)
    except Exception as error:  # a fault of the check itself is a row as well
        result = Coverage(name, reasons={"builds": explain(error)})
    send.send(result.to_dict())
    send.close()


def _ready(running: dict[Connection, _Running], limit: float) -> list[Connection]:
    """Connections with a result or a dead process at the other end, and those whose time is up."""
    now = time.monotonic()
    next_end = min(job.begin + limit for job in running.values())
    found = [c for c in wait(list(running), timeout=max(next_end - now, 0.0)) if isinstance(c, Connection)]
    late = [c for c, job in running.items() if c not in found and time.monotonic() >= job.begin + limit]
    return [*found, *late]


def _finish(receive: Connection, job: _Running, limit: float) -> Coverage:
    try:
        if receive.poll():
            return Coverage.from_dict(receive.recv())
        reason = f"it took more than {limit:.0f} s and was stopped"
    except EOFError:
        job.process.join()
        reason = f"its process died: {_death(job.process.exitcode)}"
    finally:
        job.process.kill()
        job.process.join()
        receive.close()
    return Coverage(job.type, reasons={"builds": reason}, seconds=round(time.monotonic() - job.begin, 2))


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}" + (", likely out of memory" if code == -signal.SIGKILL else "")
    return f"exit code {code}"

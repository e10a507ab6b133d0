"""Processes that check one type after another, so that one that hangs, crashes or takes all memory costs its own row
and nothing else."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from rewriter.check.coverage.report import Coverage, explain
from rewriter.common.processes import end_with_parent

Check = Callable[[str], Coverage]
"""Everything about one type; must be importable by name in another process."""

# What every check imports. The processes are forked from one that has it already, which costs milliseconds.
PRELOADED = ("rewriter.check.coverage.check", "rewriter.convert.main_job", "transformers.models.auto.modeling_auto")
# A process starts a server of its own for the ranks of the main job, which imports for seconds: it serves many types,
# but not all, since what they leave in memory adds up.
TYPES_PER_PROCESS = 16


def run(
    types: Sequence[str], check: Check, *, jobs: int = 1, limit: float = 120.0, kind: type[Coverage] = Coverage
) -> Iterator[Coverage]:
    """The rows of `types`, each a `kind`, as they become ready, `jobs` at a time, stopped after `limit` seconds.

    A process that dies or is stopped gives a row that says so. Leaves no process behind.
    """
    waiting = list(types)
    workers: list[_Worker] = []
    try:
        while waiting or any(worker.busy for worker in workers):
            idle = [worker for worker in workers if not worker.busy]
            while waiting and (idle or len(workers) < jobs):
                if not idle:
                    workers.append(_Worker(check, kind))
                    idle.append(workers[-1])
                idle.pop().begin(waiting.pop(0))
            ready = wait([worker.pipe for worker in workers if worker.busy], timeout=0.1)
            for worker in list(workers):
                if worker.busy and (worker.pipe in ready or worker.seconds > limit):
                    yield worker.row(worker.pipe in ready, limit)
                if not worker.busy and worker.ends:
                    worker.kill()
                    workers.remove(worker)
    finally:
        for worker in workers:
            worker.kill()


class _Worker:
    """A process that checks types by name. `busy`: with one. `ends`: it is to be replaced."""

    def __init__(self, check: Check, kind: type[Coverage]) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        self.pipe, other = context.Pipe()
        # not a daemon, which could not start ranks
        self.process: Any = context.Process(target=_work, args=(check, other, kind))
        self.process.start()
        other.close()
        self.busy = self.ends = False
        self._kind = kind
        self._served = 0

    def begin(self, name: str) -> None:
        self.name, self._begin, self.busy = name, time.monotonic(), True
        self._served += 1
        with contextlib.suppress(OSError):  # it is gone, and its row will say so
            self.pipe.send(name)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begin

    def row(self, ready: bool, limit: float) -> Coverage:
        """The row of the type it is busy with: the one it sent if it is `ready`, else one that says why not."""
        self.busy, seconds = False, self.seconds
        self.ends = self._served == TYPES_PER_PROCESS
        try:
            if ready:
                row: Coverage = self.pipe.recv()
                return row
            reason = f"it took more than {limit:.0f} s and was stopped"
        except EOFError:
            self.process.join()
            reason = f"its process died: {_death(self.process.exitcode)}"
        self.ends = True
        return self._kind(self.name, reasons={"builds": reason}, seconds=round(seconds, 2))

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _work(check: Check, pipe: Connection, kind: type[Coverage]) -> None:
    end_with_parent()
    while True:
        name = pipe.recv()
        try:
            result = check(name)
        except Exception as error:  # a fault of the check itself is a row as well
            result = kind(name, reasons={"builds": explain(error)})
        pipe.send(result)


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}" + (", likely out of memory" if code == -signal.SIGKILL else "")
    return f"exit code {code}"

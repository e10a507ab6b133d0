"""A process per type, so that one that hangs, crashes or takes all memory costs its own row and nothing else."""

from __future__ import annotations

import multiprocessing as mp
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from rewriter.check.coverage.report import Coverage, explain

Check = Callable[[str], Coverage]
"""Everything about one type; must be importable by name in another process."""

# What every check imports. The processes are forked from one that has it already, which costs milliseconds.
PRELOADED = ("rewriter.check.coverage.check", "transformers.models.auto.modeling_auto")


def run(
    types: Sequence[str], check: Check, *, jobs: int = 1, limit: float = 120.0, kind: type[Coverage] = Coverage
) -> Iterator[Coverage]:
    """The rows of `types`, each a `kind`, as they become ready, `jobs` at a time, stopped after `limit` seconds.

    A process that dies or is stopped gives a row that says so. Leaves no process behind.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    waiting = list(types)
    running: dict[Any, tuple[str, Any, float]] = {}  # by the end of a pipe: type, process, start
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                receive, send = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(check, name := waiting.pop(0), send, kind), daemon=True)
                process.start()
                send.close()
                running[receive] = name, process, time.monotonic()
            ready = wait(list(running), timeout=0.1)
            for receive, (name, process, begin) in list(running.items()):
                seconds = time.monotonic() - begin
                if receive in ready or seconds > limit:
                    del running[receive]
                    yield _row(name, process, receive if receive in ready else None, seconds, limit, kind)
    finally:
        for _, process, _ in running.values():
            process.kill()


def _row(
    name: str, process: Any, result: Connection | None, seconds: float, limit: float, kind: type[Coverage]
) -> Coverage:
    try:
        if result is not None:
            row: Coverage = result.recv()
            return row
        reason = f"it took more than {limit:.0f} s and was stopped"
    except EOFError:
        process.join()
        reason = f"its process died: {_death(process.exitcode)}"
    finally:
        process.kill()
        process.join()
    return kind(name, reasons={"builds": reason}, seconds=round(seconds, 2))


def _work(check: Check, name: str, send: Connection, kind: type[Coverage]) -> None:
    try:
        result = check(name)
    except Exception as error:  # a fault of the check itself is a row as well
        result = kind(name, reasons={"builds": explain(error)})
    send.send(result)


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}" + (", likely out of memory" if code == -signal.SIGKILL else "")
    return f"exit code {code}"

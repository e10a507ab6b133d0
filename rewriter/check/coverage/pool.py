"""A process per type, so that one that hangs, crashes or takes all memory costs its own row and nothing else."""

from __future__ import annotations

import multiprocessing as mp
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from typing import Any

from rewriter.check.coverage.coverage_row import Coverage, explain

Check = Callable[[str], Coverage]
"""Everything about one type; must be importable by name in another process."""

# What every check imports. The processes are forked from one that has it already, which costs milliseconds.
PRELOADED = ("rewriter.check.coverage.check", "transformers.models.auto.modeling_auto")


def run(types: Sequence[str], check: Check, *, jobs: int = 1, limit: float = 120.0) -> Iterator[Coverage]:
    """The rows of `types` as they become ready, `jobs` at a time, each stopped after `limit` seconds.

    A process that dies or is stopped gives a row that says so. Leaves no process behind.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    running: set[Any] = set()  # processes
    with ThreadPoolExecutor(jobs) as threads:
        rows = [threads.submit(_row, name, check, limit, context, running) for name in types]
        try:
            for row in as_completed(rows):
                yield row.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                process.kill()


def _row(name: str, check: Check, limit: float, context: Any, running: set[Any]) -> Coverage:
    begin = time.monotonic()
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(check, name, send), daemon=True)
    process.start()
    running.add(process)
    send.close()
    try:
        if receive.poll(limit):
            row: Coverage = receive.recv()
            return row
        reason = f"it took more than {limit:.0f} s and was stopped"
    except EOFError:
        process.join()
        reason = f"its process died: {_death(process.exitcode)}"
    finally:
        running.remove(process)
        process.kill()
        process.join()
        receive.close()
    return Coverage(name, reasons={"builds": reason}, seconds=round(time.monotonic() - begin, 2))


def _work(check: Check, name: str, send: Connection) -> None:
    try:
        result = check(name)
    except Exception as error:  # a fault of the check itself is a row as well
        result = Coverage(name, reasons={"builds": explain(error)})
    send.send(result)
    send.close()


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}" + (", likely out of memory" if code == -signal.SIGKILL else "")
    return f"exit code {code}"

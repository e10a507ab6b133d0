"""Sections of `run.py`, each in a process of its own with a limit: one that hangs or dies loses its own rows only."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import LOST, Rows, Scale, named

STACK_SECONDS = 2.0  # for a section that is ended to say where it was
KILL_SECONDS = 10.0  # a process in the driver may not end at once, or not at all


@dataclass(frozen=True)
class Section:
    """`function`, "module:name", takes a Scale. Its process is ended after `seconds`."""

    function: str
    seconds: float


def compute(section: Section, name: str, scale: Scale) -> None:
    """All of a section, in this process. What its function raises is a row."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    module, _, function = section.function.partition(":")
    try:
        getattr(importlib.import_module(module), function)(scale)
    except Exception as error:
        traceback.print_exc()
        assert scale.kept is not None
        put(scale.kept, "all of it", named(error))


def run(command: Sequence[str], rows: Rows, seconds: float, environment: dict[str, str]) -> str:
    """Run a section's process and, if it did not end as it should, add a row that says so. Returns what was wrong.

    The process has a group of its own, which ends with it: ranks and compilers that it started, too.
    """
    process = subprocess.Popen(command, env=environment, stdout=sys.stderr.fileno(), process_group=0)
    wrong = ""
    try:
        status = process.wait(seconds)
        if status == LOST:
            wrong = "not run: CUDA has an error that stays"
        elif status < 0:
            wrong = f"died of signal {-status} ({signal.Signals(-status).name})"
        elif status:
            wrong = f"ended with status {status}"
    except subprocess.TimeoutExpired:
        wrong = f"ended after {seconds:.0f} s"
        process.send_signal(signal.SIGUSR1)  # it prints where it is
        time.sleep(STACK_SECONDS)
    finally:
        wrong = ", ".join(filter(None, (wrong, end(process))))
    if wrong:
        put(rows, "the rest", wrong)
    return wrong


def end(process: subprocess.Popen[bytes]) -> str:
    """Kill the process and its group; what is wrong if it stays."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(KILL_SECONDS)
    except subprocess.TimeoutExpired:
        return f"process {process.pid} cannot be killed"
    return ""


def put(rows: Rows, what: str, wrong: str) -> None:
    rows.write(rows.section, {"section": what, "result": wrong}, True)


def read(path: Path, start: int = 0) -> list[dict[str, Any]]:
    """The records of a file of rows from byte `start` on."""
    with path.open("rb") as file:
        file.seek(start)
        return [json.loads(line) for line in file.read().decode().splitlines()]

"""A command run to its end, with the seconds it took and the memory that it and its children had at their peak."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rewriter.common.processes import environment

SAMPLE_SECONDS = 0.2


@dataclass(frozen=True)
class Usage:
    """`resident`: the largest sum over the processes of a tree, shared pages counted once, sampled; bytes."""

    seconds: float
    resident: int


def run(code: str, *arguments: object) -> Usage:
    """Run Python code in a process of its own. Raises RuntimeError with what it wrote where it fails."""
    command: Sequence[str] = [sys.executable, "-c", code, *map(str, arguments)]
    begin, resident = time.perf_counter(), 0
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE) as process:
        try:
            while process.poll() is None:
                pids = tree(process.pid)
                # Looking through pages slows a process down: one alone shares none.
                resident = max(resident, _alone(pids[0]) if len(pids) == 1 else sum(map(_resident, pids)))
                time.sleep(SAMPLE_SECONDS)
        except BaseException:
            process.kill()
            raise
        seconds = time.perf_counter() - begin
        errors = process.stderr.read().decode() if process.stderr else ""
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {errors.strip()[-2000:]}")
    return Usage(seconds, resident)


def tree(pid: int) -> list[int]:
    """A process and its children, their children, …, as far as they are still there."""
    found = [pid]
    for parent in found:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += map(int, children.read_text().split())
            except OSError:
                continue
    return found


def _alone(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # it has ended
        return 0


def _resident(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return 1024 * int(match[1]) if (match := re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE)) else 0

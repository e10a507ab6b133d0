"""Processes of a job that tests start, and whether they are gone."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def until(holds: Callable[[], bool], seconds: float = 120.0) -> bool:
    limit = time.monotonic() + seconds
    while not holds() and time.monotonic() < limit:
        time.sleep(0.02)
    return holds()


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


RANK = """
import os, time
from rewriter.common.processes import end_with_job
end_with_job()
os.write(1, f"{os.getpid()} ".encode())
time.sleep(600)
"""


def descendants(pid: int) -> list[int]:
    try:
        own = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return own + [below for child in own for below in descendants(child)]

"""Checks that end badly, for test_coverage.py. Processes import this file by name, so it imports nothing heavy."""

from __future__ import annotations

import os
import signal
import time

from rewriter.check.coverage.report import Coverage


def check(name: str) -> Coverage:
    """Hangs or crashes where the name says so; else a row."""
    if name.startswith("hangs"):
        time.sleep(600)
    if name == "crashes":
        os.kill(os.getpid(), signal.SIGKILL)
    return Coverage(name, builds=True)

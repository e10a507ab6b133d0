"""The handle of an operation of the wire mode."""

from __future__ import annotations

import time
from datetime import timedelta

from rewriter.emulation.cpu_progress import CpuProgress, Underway
from rewriter.emulation.deadlines import Deadlines
from rewriter.emulation.operation import EmulatedOperation
from rewriter.emulation.work import EmulatedWork


class WireWork(EmulatedWork):
    """An operation whose messages have all arrived may still have to last: `arrive` gives the time."""

    def __init__(self, operation: EmulatedOperation, progress: CpuProgress, deadlines: Deadlines) -> None:
        super().__init__(operation)
        self.underway: Underway | None = None
        self._progress, self._deadlines = progress, deadlines
        self._due: float | None = None

    def arrive(self, due: float) -> None:
        """All messages are through; it ends at `due`, seconds of `time.monotonic`, or later, or now."""
        self._due = due
        if self.deadline() <= time.monotonic():
            self.finish()
            return
        self.ready()
        if self.awaited_as_future:
            self.on_future()

    def deadline(self) -> float:
        due = 0.0 if self._due is None else self._due
        return due if self.underway is None else max(due, self._progress.end(self.underway))

    def wait(self, timeout: timedelta | None = None) -> bool:
        with self._progress.waiting():
            return super().wait(timeout)

    def on_future(self) -> None:
        if self._due is not None:
            self._deadlines.at(self.deadline(), self._perhaps)

    def _perhaps(self) -> None:
        """Finish, unless the program has computed meanwhile."""
        if self.deadline() <= time.monotonic():
            self.finish()
        else:
            self.on_future()

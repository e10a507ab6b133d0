"""Calls functions at given moments."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from itertools import count

_SPIN = 1.2e-4  # seconds before a moment from which on it is watched: about what a sleep is late


class Deadlines:
    """One thread, started when it is first needed, that calls each function when its time has come."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = count()  # functions cannot be compared
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def at(self, moment: float, function: Callable[[], None]) -> None:
        """Call `function` at `moment`, seconds of `time.monotonic`."""
        with self._changed:
            heapq.heappush(self._heap, (moment, next(self._count), function))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="emulated-deadlines", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """End the thread; what is not due yet is not called."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (not self._heap or self._heap[0][0] > time.monotonic() + _SPIN):
                    self._changed.wait(self._heap[0][0] - time.monotonic() - _SPIN if self._heap else None)
                if self._closed:
                    return
                moment, _, function = heapq.heappop(self._heap)
            while time.monotonic() < moment:
                pass
            function()

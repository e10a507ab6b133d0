"""Progress of the operations of one rank, whose library needs the core that the rank computes on.

An operation goes on at one rate while its rank waits and at a lower one while it computes (`Delay.hindrance`): on a CPU
the threads that serve the network get the core in turn with the program. How long the program computed is read from
the CPU clocks of the threads that called operations, and nobody has to be asked: from the moment of one look at the
clocks to the next, the share of computing is taken as constant.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from rewriter.fabric import Delay

_OVER = 2e-6  # seconds that an operation may lack at its end: clocks are not read at once


@dataclass(eq=False)
class Underway:
    """An operation: `arrived` when the last rank called it, seconds of `time.monotonic`. `done`: the share of it that
    is over, from `start` on; its links are free again from `released` on."""

    arrived: float
    delay: Delay
    stream: str | None
    start: float | None = None
    done: float = 0.0
    released: float | None = None
    end: float | None = None

    def lasts(self, busy: float) -> float:
        """Seconds from start to end, where the rank computes for a share `busy` of the time."""
        seconds, hindrance = self.delay.seconds, self.delay.hindrance
        if not busy or not hindrance or seconds <= 0:
            return seconds
        return 1 / ((1 - busy) / seconds + busy / (seconds + hindrance))


class _Course(NamedTuple):
    start: float
    released: float
    end: float


class CpuProgress:
    """Operations in the order of their arrival. Each holds its links for its transfer, as `fabric.Links` says, and its
    `stream`, if it has one, to its end. May be used by several threads."""

    def __init__(self) -> None:
        self._underway: list[Underway] = []
        self._free: dict[str, float] = {}
        self._at = 0.0  # up to when all is accounted for
        self._waiting = 0  # threads that wait for operations
        self._callers = _Callers()
        self._lock = threading.Lock()

    def called(self) -> None:
        """The calling thread is one of the program's: what it computes hinders operations."""
        with self._lock:
            self._callers.add()

    def begin(self, arrived: float, delay: Delay, stream: str | None = None) -> Underway:
        """An operation of `delay` whose last rank arrived at `arrived`."""
        one = Underway(arrived, delay, stream)
        with self._lock:
            self._advance(min(arrived, time.monotonic()))
            self._underway.append(one)
            course = self._courses(self._at, 0.0)[one]
            if course.start < self._at:  # it arrived before the last look at the clocks
                one.start = course.start
                one.done = min(1.0, (self._at - course.start) / delay.seconds) if delay.seconds > 0 else 1.0
        return one

    def end(self, one: Underway) -> float:
        """End of `one`, if the rank does not compute from now on."""
        with self._lock:
            self._advance(time.monotonic())
            return one.end if one.end is not None else self._courses(self._at, 0.0)[one].end

    def start(self, one: Underway) -> float:
        """Start of `one`, as far as that is known now."""
        with self._lock:
            return one.start if one.start is not None else self._courses(self._at, 0.0)[one].start

    def share(self, one: Underway) -> float:
        """Share of `one` that is over, between 0 and 1."""
        with self._lock:
            self._advance(time.monotonic())
            return one.done

    def spent(self, seconds: float) -> None:
        """The calling thread took CPU time that is no computation of the program."""
        with self._lock:
            self._callers.spent += seconds

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Meanwhile the program does not compute, no matter what the clocks say."""
        with self._lock:
            self._advance(time.monotonic())
            self._waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._advance(time.monotonic())
                self._waiting -= 1

    # --- with the lock held ---

    def _advance(self, now: float) -> None:
        since, self._at = self._at, max(self._at, now)
        passed = self._at - since
        if passed <= 0:
            return
        computed = self._callers.computed()
        if not self._underway:
            return
        busy = 0.0 if self._waiting else min(1.0, max(0.0, computed / passed))
        for one, course in self._courses(since, busy).items():
            if course.start < now:
                one.start = course.start
                lasts = one.lasts(busy)
                one.done = min(1.0, one.done + (now - max(course.start, since)) / lasts) if lasts > 0 else 1.0
            if course.released <= now:
                one.released = course.released
            if course.end <= now + _OVER:
                one.start, one.done, one.released, one.end = course.start, 1.0, course.released, course.end
        while self._underway and self._underway[0].end is not None:
            over = self._underway.pop(0)
            for name, until in self._held(over, over.released, over.end):
                self._free[name] = max(until, self._free.get(name, until))

    def _courses(self, since: float, busy: float) -> Mapping[Underway, _Course]:
        """The course of each operation, if the rank computes for a share `busy` of the time from `since` on."""
        free, courses = dict(self._free), {}
        for one in self._underway:
            start, released, end = one.start, one.released, one.end
            if start is None:
                start = max([one.arrived, *(free.get(name, one.arrived) for name, _ in self._held(one))])
            begin, lasts = max(start, since), one.lasts(busy)
            if end is None:
                end = begin + (1 - one.done) * lasts
            if released is None:
                transfer = one.delay.transfer / one.delay.seconds if one.delay.seconds > 0 else 1.0
                released = begin + max(0.0, transfer - one.done) * lasts
            for name, until in self._held(one, released, end):
                free[name] = max(until, free.get(name, until))
            courses[one] = _Course(start, released, end)
        return courses

    @staticmethod
    def _held(one: Underway, released: float | None = None, end: float | None = None) -> list[tuple[str, float]]:
        """(name, until when) of what the operation has for itself."""
        held = [(link, released or 0.0) for link in one.delay.links]
        return held if one.stream is None else [*held, (f"stream {one.stream}", end or 0.0)]


@dataclass
class _Callers:
    """The CPU clocks of threads. `spent`: seconds of theirs that do not count."""

    spent: float = 0.0
    _clocks: dict[int, int] = field(default_factory=dict)  # by thread; where a thread has none, the process' instead
    _last: float | None = None

    def add(self) -> None:
        me = threading.get_ident()
        if me in self._clocks:
            return
        clock_of = getattr(time, "pthread_getcpuclockid", None)
        self._clocks[me] = time.CLOCK_PROCESS_CPUTIME_ID if clock_of is None else clock_of(me)
        self._last = self._read()

    def computed(self) -> float:
        """CPU seconds since the last call, of all threads together."""
        now = self._read()
        seconds = now - (now if self._last is None else self._last) - self.spent
        self._last, self.spent = now, 0.0
        return seconds

    def _read(self) -> float:
        total = 0.0
        for thread, clock in list(self._clocks.items()):
            try:
                total += time.clock_gettime(clock)
            except OSError:  # the thread has ended
                del self._clocks[thread]
                self._last = None
        return total

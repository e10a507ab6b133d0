"""Operations that take as long as a model of delays says, timed on the CPU.

An operation begins when this rank, the last real one to arrive, calls it, and its links are free; when it ends depends
on how much of the time the rank computes (see `CpuProgress`). Who waits watches the clock (see `EmulatedWork`). A
thread writes large results, spends the CPU time that the real exchange takes from this rank's core, spread over
the delay, and sets futures.
"""

from __future__ import annotations

import ctypes
import threading
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

from rewriter.emulation.cpu_progress import CpuProgress
from rewriter.emulation.operation import EmulatedOperation
from rewriter.emulation.rendezvous import Rendezvous, write
from rewriter.emulation.work import TIMER_SPIN, EmulatedWork, Timer
from rewriter.fabric import Call, Delay, DelayModel
from rewriter.fabric.calls import directed_delay
from rewriter.fabric.overlap import OverlapCosts

_INLINE = 1 << 16  # bytes that are written sooner than a thread is woken
_TICK = 1e-3  # seconds between two shares of CPU time at most: to wake a thread takes some, too
_TICKS = 8  # as many in a short operation
_PIECE = 1 << 18  # bytes copied at a time where CPU time is spent: some 30 µs
# CPU seconds that the caller spends at once: a thread that shares its core would be woken, and done, too late
_BRIEF = 1e-3


@dataclass(frozen=True)
class Late:
    """Lateness of emulated peers: `model`, whose collectives start with the last peer of a group that has emulated
    ones, later than this rank by `OverlapCosts.skew`, which is latency. `real`: ranks that run. A message has no group
    to wait for."""

    model: DelayModel
    overlap: OverlapCosts
    real: frozenset[int]

    def delay(self, call: Call) -> Delay:
        delay = self.model.delay(call)
        return replace(delay, seconds=delay.seconds + self.late(call, 0.0))

    def late(self, call: Call, computed: float) -> float:
        """Seconds, after `computed` seconds of kernels since the collective before."""
        if call.kind == "send" or self.real.issuperset(call.ranks):
            return 0.0
        return self.overlap.skew(call.size, computed)

    def later(self, call: Call, computed: float) -> float:
        """By how much longer than `delay` says this rank waits after `computed` seconds."""
        return max(0.0, self.late(call, computed) - self.late(call, 0.0))


class DelayEngine:
    """`model` says how long; `rendezvous`, where several ranks are real, when the last of them came."""

    def __init__(self, model: DelayModel, rendezvous: Rendezvous | None = None) -> None:
        self.model = model
        self._rendezvous = rendezvous
        self._progress = CpuProgress()
        self._timer = Timer()
        self._called = time.thread_time()  # when the last operation was, on the clock of what this thread computes

    def submit(self, operation: EmulatedOperation) -> DelayedWork:
        self._progress.called()
        begun, now = time.thread_time(), operation.called
        delay = directed_delay(self.model, operation.call, operation.own, operation.receives)
        if isinstance(self.model, Late):
            late = self.model.later(operation.call, max(0.0, begun - self._called))
            delay = replace(delay, seconds=delay.seconds + late)
        self._called = begun
        work = DelayedWork(operation, delay, self._progress, self._timer)
        if self._rendezvous is None or not self._rendezvous.last(operation, now, partial(self._met, work)):
            self._arrived(work, now)
        self._progress.spent(time.thread_time() - begun)
        return work

    def _met(self, work: DelayedWork, now: float, values: bytes | None, error: BaseException | None) -> None:
        """As `_arrived`, from the thread that listens to other real ranks: what goes wrong is raised by `wait`."""
        work.values = values
        try:
            if error is not None:
                raise error
            self._arrived(work, now)
        except BaseException as failure:
            work.finish(failure)

    def _arrived(self, work: DelayedWork, now: float) -> None:
        operation, delay = work.operation, work.delay
        # on fabrics of GPUs a group's kernels are on one stream
        stream = operation.group if delay.blocks and operation.call.kind != "send" else None
        work.underway, work.due = self._progress.begin(now, delay, stream), now
        if delay.cpu_seconds <= _BRIEF and operation.output_bytes <= _INLINE:
            if not operation.receives:  # else what it gets may not have been sent yet: see `wait`
                work.fill()
            work.ready()
            if delay.cpu_seconds:
                # what the call itself takes is part of what was measured
                spend(delay.cpu_seconds - (time.monotonic() - operation.called))
            if work.awaited_as_future:
                self._timer.add(work)
        else:
            self._timer.add(work)

    def close(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.close()
        self._timer.close()


class DelayedWork(EmulatedWork):
    """`delay`: how long it takes. `values`: of a real rank that has them, instead of those of uniform ranks. `underway`
    is None until all real ranks have come."""

    def __init__(self, operation: EmulatedOperation, delay: Delay, progress: CpuProgress, timer: Timer) -> None:
        super().__init__(operation, progress, timer)
        self.delay = delay
        self.cpu_seconds = min(delay.cpu_seconds, delay.seconds)  # it ends when asked to
        self.filled = False
        self.values: bytes | None = None
        self._filling = threading.Lock()

    @property
    def start(self) -> float:
        return time.monotonic() if self.underway is None else self._progress.start(self.underway)

    @property
    def share(self) -> float:
        return 0.0 if self.underway is None else self._progress.share(self.underway)

    @property
    def end(self) -> float:
        return self.deadline()

    def fill(self) -> None:
        with self._filling:
            if not self.filled:
                if self.values:
                    write(self.values, self.operation.outputs)
                else:
                    self.operation.fill()
                self.filled = True

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._ready.is_set() and self._error is None:
            self.fill()
        over = super().wait(timeout)
        self.fill()  # a message whose sender came while this rank was waiting
        return over

    def is_completed(self) -> bool:
        over = super().is_completed()
        if over and self._error is None:
            self.fill()
        return over

    def advance(self, begun: float) -> float:
        # a message that a rank sends itself may be sent later than it is received
        if not self.filled and (not self.operation.receives or self.values or self.share >= 0.5):
            self.fill()
        tick = min(_TICK, self.delay.seconds / _TICKS)
        owed = self._owed() - (time.thread_time() - begun)
        if owed > 0:
            spend(min(owed, 2 * tick))
        if self.spent + time.thread_time() - begun < self.cpu_seconds or not self.filled:
            now = time.monotonic()
            return min(now + tick, max(now, self._latest(self.cpu_seconds - self.spent)))
        self.ready()
        return super().advance(begun)

    def _owed(self) -> float:
        """CPU seconds that should have been spent by now, and were not."""
        left = self.cpu_seconds - self.spent
        return left if time.monotonic() >= self._latest(left) else left - self.cpu_seconds * (1 - self.share)

    def _latest(self, left: float) -> float:
        """Time at which the last of it has to be begun, to end in time."""
        return self.deadline() - left - TIMER_SPIN


_scratch = ctypes.create_string_buffer(2 * _PIECE)


def spend(seconds: float) -> None:
    """Take CPU time from this core, without the GIL, by copying memory as a transfer does."""
    begun = time.thread_time()
    place = ctypes.addressof(_scratch)
    while time.thread_time() - begun < seconds:
        ctypes.memmove(place + _PIECE, place, _PIECE)

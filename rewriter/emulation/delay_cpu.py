"""Operations that take as long as a model of delays says, timed on the CPU.

An operation begins when this rank, the last real one to arrive, calls it, and its links are free; when it ends depends
on how much of the time the rank computes (see `CpuProgress`). Who waits watches the clock (see `EmulatedWork`). A
thread writes large results, spends the CPU time that the real exchange takes from this rank's core, spread over
the delay, and sets futures.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

from rewriter.common.errors import RewriterError
from rewriter.emulation.cpu_progress import CpuProgress, Underway
from rewriter.emulation.link_directions import directed
from rewriter.emulation.operation import EmulatedOperation
from rewriter.emulation.rendezvous import Rendezvous, write
from rewriter.emulation.work import CollectiveAborted, EmulatedWork
from rewriter.fabric import Delay, DelayModel

_INLINE = 1 << 16  # bytes that are written sooner than a thread is woken
_TICK = 1e-3  # seconds between two shares of CPU time at most: to wake a thread takes some, too
_TICKS = 8  # as many in a short operation
_PIECE = 1 << 18  # bytes copied at a time where CPU time is spent: some 30 µs
# CPU seconds that the caller spends at once: a thread that shares its core would be woken, and done, too late
_BRIEF = 1e-3
_SPIN = 1.2e-4  # seconds before a deadline from which on it is watched


class DelayEngine:
    """`model` says how long; `rendezvous`, where several ranks are real, when the last of them came."""

    def __init__(self, model: DelayModel, rendezvous: Rendezvous | None = None) -> None:
        self.model = model
        self._rendezvous = rendezvous
        self._progress = CpuProgress()
        self._timer = Timer()

    def submit(self, operation: EmulatedOperation) -> DelayedWork:
        self._progress.called()
        begun, now = time.thread_time(), operation.called
        call, delay = operation.call, Delay(0.0, 0.0, ())
        if call.size > 1:
            delay = directed(self.model.delay(call), call, operation.own, operation.receives)
        work = DelayedWork(operation, delay, self._progress, self._timer)
        if self._rendezvous is not None and self._rendezvous.shared(operation):
            self._rendezvous.last(operation, now, partial(self._met, work))
        else:
            self._arrived(work, now)
        self._progress.spent(time.thread_time() - begun)
        return work

    def _met(self, work: DelayedWork, now: float, values: bytes | None, error: BaseException | None) -> None:
        """As `_arrived`, from the thread that listens to other real ranks: what goes wrong is raised by `wait`."""
        if error is not None:
            work.finish(error)
            return
        work.values = values
        try:
            self._arrived(work, now)
        except BaseException as failure:
            work.finish(failure)

    def _arrived(self, work: DelayedWork, now: float) -> None:
        operation, delay = work.operation, work.delay
        # on fabrics of GPUs a group's kernels are on one stream
        stream = operation.group if delay.blocks and operation.call.kind != "send" else None
        work.underway = self._progress.begin(now, delay, stream)
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
    def __init__(self, operation: EmulatedOperation, delay: Delay, progress: CpuProgress, timer: Timer) -> None:
        super().__init__(operation)
        self.delay = delay
        self.cpu_seconds = min(delay.cpu_seconds, delay.seconds)  # it ends when asked to
        self.underway: Underway | None = None  # until all real ranks have come
        self._progress = progress
        self.filled = False
        self.values: bytes | None = None  # of a real rank that has them, instead of those of uniform ranks
        self._filling = threading.Lock()
        self.spent = 0.0  # seconds of CPU time
        self._timer = timer

    @property
    def start(self) -> float:
        """When it starts: now, as far as is known."""
        return time.monotonic() if self.underway is None else self._progress.start(self.underway)

    @property
    def end(self) -> float:
        """When it ends, if this rank does not compute from now on."""
        return math.inf if self.underway is None else self._progress.end(self.underway)

    @property
    def share(self) -> float:
        """How much of it is over."""
        return 0.0 if self.underway is None else self._progress.share(self.underway)

    def deadline(self) -> float:
        return self.end

    def fill(self) -> None:
        """Write the outputs, once."""
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
        with self._progress.waiting():
            over = super().wait(timeout)
        self.fill()  # a message whose sender came while this rank was waiting
        return over

    def is_completed(self) -> bool:
        over = super().is_completed()
        if over and self._error is None:
            self.fill()
        return over

    def on_future(self) -> None:
        if self._ready.is_set():
            self._timer.add(self)

    @property
    def fillable(self) -> bool:
        """Whether what is to be written is known, or is not waited for any longer."""
        source = self.operation.source
        return source is None or source.tensor is not None or bool(self.values) or self.share >= 0.5

    def owed(self) -> float:
        """CPU seconds that should have been spent by now, and were not."""
        left = self.cpu_seconds - self.spent
        return left if time.monotonic() >= self._latest(left) else left - self.cpu_seconds * (1 - self.share)

    def _latest(self, left: float) -> float:
        """When the last of it has to be begun, to end in time."""
        return self.end - left - _SPIN

    @property
    def tick(self) -> float:
        """Seconds from one share of its CPU time to the next."""
        return min(_TICK, self.delay.seconds / _TICKS)

    def next_share(self) -> float:
        """When to look again: a tick later, or when the last has to be begun."""
        now = time.monotonic()
        return min(now + self.tick, max(now, self._latest(self.cpu_seconds - self.spent)))


@dataclass
class Timer:
    """The thread. It starts with the first work that needs it."""

    _works: list[DelayedWork] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None
    _closed: bool = False
    _accounted: float = 0.0  # of the thread's CPU time

    def add(self, work: DelayedWork) -> None:
        with self._changed:
            if self._closed:
                raise RewriterError(
                    f"{work.operation.title}: the emulated job has ended. Call init_process_group again"
                )
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rewriter-emulated", daemon=True)
                self._thread.start()
            if work not in self._works:
                self._works.append(work)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._works and not self._closed:
                    self._changed.wait()
                if self._closed:
                    break
                works = list(self._works)
            wake = min(self._advance(work) for work in works)
            with self._changed:
                self._works = [work for work in self._works if not work.finished]
                if len(self._works) == len(works) and not self._closed:
                    self._changed.wait(min(max(0.0, wake - time.monotonic()), threading.TIMEOUT_MAX))
        for work in self._works:
            work.finish(CollectiveAborted(f"{work.operation.title}: the emulated job ended meanwhile"))

    def _advance(self, work: DelayedWork) -> float:
        """Do what is due of `work`; the time at which it has to be looked at again. What this takes of the CPU is spent
        in its place."""
        begun = self._accounted  # with what came since, as waking
        try:
            return self._due(work, begun)
        except BaseException as error:
            work.finish(error)
            return time.monotonic()
        finally:
            self._accounted = time.thread_time()
            work.spent += self._accounted - begun

    def _due(self, work: DelayedWork, begun: float) -> float:
        if not work.filled and work.fillable:
            work.fill()
        owed = work.owed() - (time.thread_time() - begun)
        if owed > 0:
            spend(min(owed, 2 * work.tick))
        if work.spent + time.thread_time() - begun < work.cpu_seconds or not work.filled:
            return work.next_share()
        work.ready()
        end = work.end
        if work.awaited_as_future and end - time.monotonic() <= _SPIN:
            while time.monotonic() < end:
                pass
            end = work.end  # later, if the program computed meanwhile
        if time.monotonic() >= end:
            work.finish()
            return end
        return max(time.monotonic(), end - _SPIN) if work.awaited_as_future else end


_scratch = ctypes.create_string_buffer(2 * _PIECE)


def spend(seconds: float) -> None:
    """Take CPU time from this core, without the GIL, by copying memory as a transfer does."""
    begun = time.thread_time()
    place = ctypes.addressof(_scratch)
    while time.thread_time() - begun < seconds:
        ctypes.memmove(place + _PIECE, place, _PIECE)

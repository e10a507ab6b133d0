"""Operations under way: what an engine is, the handles that it returns, and the thread that watches their ends."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from rewriter.common.errors import RewriterError
from rewriter.emulation.cpu_progress import CpuProgress, Underway
from rewriter.emulation.operation import EmulatedOperation

# Seconds before an end from which on it is watched, about what a sleep is late: by who waits, by the timer's thread.
_SPIN, TIMER_SPIN = 2e-4, 1.2e-4
_RETURN = 4e-5  # seconds from the end of watching to the caller's next instruction


@runtime_checkable
class Engine(Protocol):
    """One for each process: all process groups of an emulated job share it.

    `submit` is called under the order in which this rank calls its collectives (each group counts them in
    `operation.sequence`), possibly from several threads, one for each group at a time. It returns at once a
    `torch.distributed.Work`; `EmulatedWork` is one for engines whose operations end on the CPU. When it is over, the
    outputs are written (`operation.fill()`). Raises RewriterError where the engine cannot do it. `close` ends the job:
    operations under way are aborted, threads and connections end. Twice is allowed.
    """

    def submit(self, operation: EmulatedOperation) -> Any: ...

    def close(self) -> None: ...


class CollectiveTimeout(RewriterError, dist.DistError):
    """A collective that took longer than its timeout. Also what torch's own backends raise: a RuntimeError."""


class CollectiveAborted(RewriterError, dist.DistError):
    """A collective whose process group was aborted, or whose peer is gone."""


class OperationWork(dist.Work):
    def __init__(self, operation: EmulatedOperation) -> None:
        super().__init__()
        self.operation = operation

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        return list(self.operation.outputs)

    def source_rank(self) -> int:
        """Rank, in the group, of a message's sender; -1 for what is no message."""
        return -1 if self.operation.root is None else self.operation.root

    _source_rank = source_rank


class EmulatedWork(OperationWork):
    """An operation between its start and its end on the CPU, as `torch.distributed.Work`.

    An engine says when its results are there (`finish`), or first that all is done but time has to pass (`ready`, until
    `deadline`): who waits watches the clock, so that no thread has to be woken at the moment. Where somebody holds a
    future, which has to be set at the moment, `timer` watches it.
    """

    def __init__(self, operation: EmulatedOperation, progress: CpuProgress, timer: Timer) -> None:
        super().__init__(operation)
        self.underway: Underway | None = None
        self.due = math.inf
        self.spent = 0.0  # seconds of CPU time that the timer's thread spent on it
        self._progress, self._timer = progress, timer
        self._ready = threading.Event()
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._future: torch.futures.Future[list[Tensor]] | None = None
        self._lock = threading.Lock()

    # --- for engines ---

    def ready(self) -> None:
        """The outputs are written; the operation ends at `deadline`."""
        self._ready.set()

    def deadline(self) -> float:
        """End of the operation, if the rank waits for it: seconds of `time.monotonic`. Not before `due`; it may be
        later when it is asked again."""
        return self.due if self.underway is None else max(self.due, self._progress.end(self.underway))

    def finish(self, error: BaseException | None = None) -> None:
        """It is over now. What is waiting goes on, or raises `error`; only the first call counts."""
        with self._lock:
            if self._done.is_set():
                return
            self._error = error
            self._done.set()
            self._ready.set()
            future = self._future
        if future is not None:
            self._settle(future)

    @property
    def finished(self) -> bool:
        return self._done.is_set()

    @property
    def awaited_as_future(self) -> bool:
        return self._future is not None

    def advance(self, begun: float) -> float:
        """Do what is due, in the timer's thread, whose CPU time was `begun`; when to be called again."""
        end = self.deadline()
        if self.awaited_as_future and end - time.monotonic() <= TIMER_SPIN:
            while time.monotonic() < end:
                pass
            end = self.deadline()  # later, if the program computed meanwhile
        if time.monotonic() >= end:
            self.finish()
            return end
        return max(time.monotonic(), end - TIMER_SPIN) if self.awaited_as_future else end

    def _settle(self, future: torch.futures.Future[list[Tensor]]) -> None:
        if self._error is None:
            future.set_result(list(self.operation.outputs))
        else:
            # RuntimeError is what the C++ side of a future can carry
            future.set_exception(RuntimeError(str(self._error)))  # type: ignore[arg-type]

    # --- for programs: torch.distributed.Work ---

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the end; True. `timeout`: of this wait, instead of the operation's own, which counts from its
        start. Raises CollectiveTimeout, or what the operation failed with."""
        begun, seconds = self.operation.called, self.operation.timeout
        if timeout is not None and timeout > timedelta(0):
            begun, seconds = time.monotonic(), timeout.total_seconds()
        limit = begun + seconds
        with self._progress.waiting():
            if not self._ready.wait(max(0.0, limit - time.monotonic())):
                self._late(seconds)
            self._until(limit, seconds)
        if self._error is not None:
            raise self._error
        return True

    def _until(self, limit: float, seconds: float) -> None:
        while not self._done.is_set() and (deadline := self.deadline()) - _RETURN > time.monotonic():
            end = min(deadline, limit)
            remaining = end - time.monotonic()
            if remaining > _SPIN:
                self._done.wait(remaining - _SPIN)
            while time.monotonic() < end - _RETURN and not self._done.is_set():
                pass
            if limit < deadline and not self._done.is_set():
                self._late(seconds)

    def _late(self, seconds: float) -> None:
        raise CollectiveTimeout(
            f"{self.operation.title}: not done within {seconds:g} s. Check that all real ranks call it, or give a "
            "larger timeout to init_process_group or new_group"
        )

    def is_completed(self) -> bool:
        if not self._done.is_set() and self._ready.is_set():
            return time.monotonic() >= self.deadline()
        return self._done.is_set()

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def get_future(self) -> Any:
        with self._lock:
            if self._future is not None:
                return self._future
            future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
            self._future = future
            over = self._done.is_set()
        if over:
            self._settle(future)
        elif self._ready.is_set():
            self._timer.add(self)
        return future


@dataclass
class Timer:
    """A thread that ends works in time. It starts with the first that needs it."""

    _works: list[EmulatedWork] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None
    _closed: bool = False
    _accounted: float = 0.0  # of the thread's CPU time

    def add(self, work: EmulatedWork) -> None:
        """Call `work.advance` when that is due. Raises RewriterError after `close`."""
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
        """End the thread. Works that are left are aborted."""
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

    def _advance(self, work: EmulatedWork) -> float:
        begun = self._accounted  # with what came since, as waking
        try:
            return work.advance(begun)
        except BaseException as error:
            work.finish(error)
            return time.monotonic()
        finally:
            self._accounted = time.thread_time()
            work.spent += self._accounted - begun


class Together(dist.Work):
    """Several operations that one call started (a coalesced one); it is over when all are."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self.works = tuple(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self.works:
            work.wait(timeout) if timeout is not None else work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Any:
        def values(done: Any) -> list[Tensor]:
            return [tensor for future in done.value() for tensor in future.value()]

        return torch.futures.collect_all([work.get_future() for work in self.works]).then(values)


class Deferred(Together):
    """An operation between `_start_coalescing` and `_end_coalescing`, which begins it and sets `works`. To wait before
    that does nothing: torch waits for each call of a synchronous function there, too."""

    def __init__(self, operation: EmulatedOperation) -> None:
        super().__init__(())
        self.operation = operation

    def is_completed(self) -> bool:
        return bool(self.works) and super().is_completed()

    def get_future(self) -> Any:
        if not self.works:
            raise RewriterError(
                f"{self.operation.title}: it begins when coalescing ends. Ask for its future after that"
            )
        return super().get_future()

"""What a collective of several steps does between them, while its caller computes.

A collective is cut into chunks, and each chunk is a generator: it starts a message, yields it, and when resumed finds
it arrived. `pipelined` resumes them so that while one chunk's second message is on its way the next one's first is.

On CUDA, all of it is enqueued at once, on a stream of its own. On CPU somebody must wait for the first message, reduce,
quantize and send the second: a thread of its own does, one collective after another in the order in which they were
started, which is the same on all ranks. After an error, whoever runs schedules refuses to: ranks are out of step.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from queue import SimpleQueue

import torch
from torch import Tensor

from rewriter.runtime.collectives.exchange import Transfer, messages_under_way

Schedule = Generator[Transfer, None, None]


def pipelined(schedules: Iterable[Schedule]) -> None:
    """Run them to their ends. Before the messages of those under way are waited for, oldest first, the next one's first
    leaves. The order of messages depends on nothing but their number."""
    running: list[tuple[Schedule, Transfer]] = []
    for schedule in chain(schedules, repeat(None)):
        moved = []
        entered = None if schedule is None else _advanced(schedule)
        for older, transfer in running:
            transfer.wait()
            moved.append(_advanced(older))
        moved.append(entered)
        running = [found for found in moved if found is not None]
        if schedule is None and not running:
            return


def _advanced(schedule: Schedule) -> tuple[Schedule, Transfer] | None:
    transfer = next(schedule, None)
    return None if transfer is None else (schedule, transfer)


@contextmanager
def _messages() -> Iterator[None]:
    with messages_under_way("quantized collectives"), torch.no_grad():
        yield


def start(schedules: Sequence[Schedule], result: Tensor, keep: Sequence[Tensor]) -> Transfer:
    """Begin `schedules`, which write `result`; `wait` gives it. `keep` is what they read."""
    if result.is_cuda:
        return _start_on_stream(schedules, result, keep)
    job = _QueuedSchedules(schedules)
    _queue().put(job)
    return Transfer([job], lambda: result, (*keep,))


def start_one(schedule: Schedule, result: Tensor, keep: Sequence[Tensor]) -> Transfer:
    """Begin a schedule of one message, which needs nobody while that is on its way; `wait` runs the rest."""
    with _messages():
        transfer = next(schedule)

    def finish() -> Tensor:
        with _messages():
            transfer.wait()
            pipelined([schedule])
        return result

    return Transfer([], finish, (*keep,))


def run(schedules: Sequence[Schedule], result: Tensor) -> Tensor:
    """`result`, once `schedules` have written it."""
    with _messages():
        pipelined(schedules)
    return result


class _QueuedSchedules:
    """A collective in the thread's queue."""

    def __init__(self, schedules: Sequence[Schedule]) -> None:
        self.schedules = schedules
        self.inference = torch.is_inference_mode_enabled()
        self.finished = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with torch.inference_mode(self.inference), _messages():
                pipelined(self.schedules)
        except BaseException as error:  # raised where it is waited for
            self.error = error
        self.finished.set()

    def wait(self) -> None:
        self.finished.wait()
        if self.error is not None:
            raise self.error


_EXIT = 5.0  # seconds; a peer that is gone is noticed sooner

_jobs: SimpleQueue[_QueuedSchedules] | None = None
_starting = threading.Lock()


def _queue() -> SimpleQueue[_QueuedSchedules]:
    global _jobs
    with _starting:
        if _jobs is None:
            _jobs = SimpleQueue()
            threading.Thread(target=_work, args=(_jobs,), name="rewriter-collectives", daemon=True).start()
        return _jobs


def _work(jobs: SimpleQueue[_QueuedSchedules]) -> None:
    while True:
        jobs.get().run()


@atexit.register
def _finish() -> None:
    """Let collectives that nobody waited for come to their ends: a thread that comes back from a message to an
    interpreter that is gone aborts the process, whose exit status is then that of a crash."""
    if _jobs is not None:
        last = _QueuedSchedules([])
        _jobs.put(last)
        last.finished.wait(_EXIT)


def _forget() -> None:
    """A forked process has the queue, but not the thread."""
    global _jobs, _starting
    _jobs, _starting = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _start_on_stream(schedules: Sequence[Schedule], result: Tensor, keep: Sequence[Tensor]) -> Transfer:
    # `keep` and `result` belong to the caller's stream. They are held until it waits for this one, and what is freed
    # afterwards is used again after that.
    with torch.cuda.device(result.device):
        if result.device not in _streams:
            _streams[result.device] = torch.cuda.Stream()
        stream = _streams[result.device]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), _messages():
            pipelined(schedules)
    return Transfer([stream.record_event()], lambda: result, (*keep,))

"""The thread that runs, on a CPU, quantized collectives that their caller has started and not awaited yet.

Between two messages of such a collective sums are made and quantized again. On CUDA all of it is enqueued at once; on a
CPU a thread does it while the caller computes: one collective after the other in the order in which they were started,
which is the same on all ranks, over process groups that only this thread uses. Two threads that used one group would
start its messages in another order on each rank, and take one for the other.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from queue import SimpleQueue
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from rewriter.runtime.collectives.process_groups import new_groups
from rewriter.runtime.quantized.topology import CollectiveAxis, Topology

_EXIT = 5.0  # seconds; a peer that is gone is noticed sooner
_made: WeakKeyDictionary[ProcessGroup, dict[Topology, Topology]] = WeakKeyDictionary()  # by torch's default group
_jobs: SimpleQueue[StartedRun] | None = None
_starting = threading.Lock()


def own_groups(topology: Topology) -> Topology:
    """The same ranks with process groups of the thread's. All ranks call it at the same point; made at the first."""
    world = dist.group.WORLD
    assert world is not None
    made = _made.setdefault(world, {})
    if topology not in made:
        intra, inter = (
            axis
            if axis.group is None
            else CollectiveAxis.of(new_groups([dist.get_process_group_ranks(axis.group)], axis.group)[0], axis.name)
            for axis in (topology.intra, topology.inter)
        )
        made[topology] = replace(topology, intra=intra, inter=inter)
    return made[topology]


class StartedRun:
    """A collective in the thread's queue; `wait` raises what it ended in."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run, self.inference = run, torch.is_inference_mode_enabled()
        self.finished = threading.Event()
        self.error: BaseException | None = None

    def work(self) -> None:
        try:
            with torch.inference_mode(self.inference):
                self.run()
        except BaseException as error:  # raised where it is waited for
            self.error = error
        self.finished.set()

    def wait(self) -> None:
        self.finished.wait()
        if self.error is not None:
            raise self.error


def start(run: Callable[[], None]) -> StartedRun:
    """Let the thread call `run` once it has run what was started before."""
    global _jobs
    with _starting:
        if _jobs is None:
            _jobs = SimpleQueue()
            threading.Thread(target=_work, args=(_jobs,), name="rewriter-collectives", daemon=True).start()
    job = StartedRun(run)
    _jobs.put(job)
    return job


def _work(jobs: SimpleQueue[StartedRun]) -> None:
    while True:
        jobs.get().work()


@atexit.register
def _finish() -> None:
    """Let collectives that nobody waited for come to their ends: a thread that comes back from a message to an
    interpreter that is gone aborts the process, whose exit status is then that of a crash."""
    if _jobs is not None:
        start(lambda: None).finished.wait(_EXIT)


def _forget() -> None:
    """A forked process has the queue, but not the thread."""
    global _jobs, _starting
    _jobs, _starting = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)

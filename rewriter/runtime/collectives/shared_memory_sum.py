"""All-reduces of small CPU tensors between ranks of one host, through memory that they share.

A decode step sums a few kilobytes after every block. Through gloo's sockets that takes the time of some system calls on
each rank; through memory that of two copies (`benchmarks/collectives/small_sums.py`). A start copies the tensor to
where the others see it, a wait adds what all have copied, in the order of ranks, so that all get the same bits; no
thread is needed between them.
"""

from __future__ import annotations

import os
import platform
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rewriter.kernels import sum_into
from rewriter.runtime.collectives.process_groups import of_all

LARGEST = 256 * 1024  # bytes of a tensor that goes this way
_SLOTS = 8  # sums that may be under way
_LINE = 8  # int64 of a cache line, of which each flag has one for itself
_PATIENCE = 600.0  # seconds for a peer
_VIEWS = 256  # that are kept
_SPINS = 20_000  # before other processes may have the core: about 2 ms, as what yields may wait for a whole time slice


def on_one_host(group: ProcessGroup) -> bool:
    """True if the ranks of `group` share memory, which all of them ask together: ranks of one host, in one network
    namespace, on a CPU that keeps the order of its writes, with gloo."""
    if dist.get_backend(group) != "gloo":
        return False
    places = of_all(group, _place())
    return places[0] is not None and all(place == places[0] for place in places)


class SharedMemorySums:
    """The memory of `group`: for each rank and each of _SLOTS sums a flag "written", one "read", and room."""

    def __init__(self, group: ProcessGroup) -> None:
        self.ranks, self.rank, self.number = group.size(), group.rank(), 0
        flags = 2 * self.ranks * _SLOTS * _LINE
        memory = _shared_bytes(group, 8 * flags + self.ranks * _SLOTS * LARGEST)
        numbers = memory[: 8 * flags].view(torch.int64).view(2, self.ranks, _SLOTS, _LINE)
        # numpy's, because to read one of torch's elements takes ten times as long
        self.written, self.read = numbers[..., 0].numpy()
        self.room = memory[8 * flags :].view(self.ranks, _SLOTS, LARGEST)
        self.spins = _SPINS if self.ranks <= len(os.sched_getaffinity(0)) else 0
        self.views: dict[tuple[int, torch.dtype, torch.Size], list[Tensor]] = {}  # of a slot, for every rank

    def takes(self, x: Tensor) -> bool:
        return x.nbytes <= LARGEST and x.device.type == "cpu"

    def start(self, x: Tensor) -> tuple[Tensor, SharedMemorySum]:
        """Begin the sum of the contiguous `x`, in place: (`x`, what waits for it)."""
        return x, SharedMemorySum(self, x, self._write(x))

    def gather(self, x: Tensor) -> list[Tensor]:
        """The contiguous `x` of every rank."""
        number = self._write(x)
        found = [part.clone() for part in self.parts(x, number)]
        self.done(number)
        return found

    def _write(self, x: Tensor) -> int:
        self.number += 1
        slot = self.number % _SLOTS
        self.until(self.read, slot, self.number - _SLOTS)
        self._views(slot, x)[self.rank].copy_(x)
        self.written[self.rank, slot] = self.number
        return self.number

    def parts(self, x: Tensor, number: int) -> list[Tensor]:
        """What every rank has written, like `x`, in their order: memory that `done` gives back."""
        slot = number % _SLOTS
        self.until(self.written, slot, number)
        return self._views(slot, x)

    def done(self, number: int) -> None:
        self.read[self.rank, number % _SLOTS] = number

    def _views(self, slot: int, x: Tensor) -> list[Tensor]:
        """The room of every rank in a slot, like `x`. Steps of a generation have few shapes, and making views takes as
        long as the sum."""
        key = slot, x.dtype, x.shape
        views = self.views.get(key)
        if views is None:
            if len(self.views) == _VIEWS:
                self.views.clear()
            views = [rows.view(x.dtype).view(x.shape) for rows in self.room[:, slot, : x.nbytes]]
            self.views[key] = views
        return views

    def until(self, flags: Any, slot: int, number: int) -> None:
        """Wait until every rank's flag has come to `number`. Raises TimeoutError."""
        for rank in range(self.ranks):
            turns, begin = 0, 0.0
            while flags[rank, slot] < number:
                turns += 1
                if turns < self.spins:
                    continue
                os.sched_yield()
                begin = begin or time.monotonic()
                if time.monotonic() - begin > _PATIENCE:
                    raise TimeoutError(f"all-reduce through shared memory: rank {rank} did not come in {_PATIENCE:g} s")


@dataclass(eq=False)
class SharedMemorySum:
    """A sum between its start and its wait, like torch's Work."""

    sums: SharedMemorySums
    x: Tensor
    number: int

    def wait(self) -> bool:
        sum_into(self.x, self.sums.parts(self.x, self.number))
        self.sums.done(self.number)
        return True


def _place() -> tuple[str, str] | None:
    """Where this process runs: equal for those that share memory; None where it may not be used."""
    try:
        if platform.machine() not in ("x86_64", "AMD64"):
            return None
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"), os.readlink("/proc/self/ns/net")
    except OSError:
        return None


def _shared_bytes(group: ProcessGroup, size: int) -> Tensor:
    """Zeros uint8 [size] that all ranks of `group` map. The file has no name any more when this returns."""
    path: list[Any] = [None]
    if group.rank() == 0:
        shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        handle, path[0] = tempfile.mkstemp(prefix="rewriter-sums-", dir=shared)
        os.ftruncate(handle, size)
        os.close(handle)
    dist.broadcast_object_list(path, group=group, group_src=0)
    memory = torch.from_file(path[0], shared=True, size=size, dtype=torch.uint8)
    dist.barrier(group=group)
    if group.rank() == 0:
        os.unlink(path[0])
    return memory

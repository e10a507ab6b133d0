"""Which way small all-reduces and gathers of a group take where there is a faster one than the backend's."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rewriter.runtime.collectives import shared_memory_sum, socket_sum, symmetric_memory_sum
from rewriter.runtime.collectives.shared_memory_sum import SharedMemorySum, SharedMemorySums
from rewriter.runtime.collectives.socket_sum import SocketSum, SocketSums
from rewriter.runtime.collectives.symmetric_memory_sum import SymmetricMemorySum, SymmetricMemorySums

Sums = SharedMemorySums | SocketSums | SymmetricMemorySums
Sum = SharedMemorySum | SocketSum | SymmetricMemorySum
_of_group: weakref.WeakKeyDictionary[ProcessGroup, Sums] = weakref.WeakKeyDictionary()


def choose_small_sums(group: ProcessGroup | None, device: torch.device) -> str:
    """Find the fastest way for small sums of `group`; all its ranks call it together. Returns "shared memory",
    "sockets", "symmetric memory" or "backend". A group for which this was not called takes its backend's."""
    if group is None or group.size() == 1:
        return "backend"
    if device.type == "cpu" and shared_memory_sum.on_one_host(group):
        _of_group[group] = SharedMemorySums(group)
        return "shared memory"
    if device.type == "cpu" and (sums := socket_sum.connect(group)) is not None:
        _of_group[group] = sums
        return "sockets"
    if symmetric_memory_sum.why_not(group, device) is None:
        _of_group[group] = SymmetricMemorySums(group, device)
        return "symmetric memory"
    return "backend"


def small_sum_start(x: Tensor, group: ProcessGroup) -> tuple[Tensor, Sum] | None:
    """Begin the sum of the contiguous `x`: (the tensor that holds it after the wait, what waits for it). None where the
    backend sums it: large tensors, and those with gradients, whose rules are about tensors that are summed in place."""
    sums = _of_group.get(group)
    if sums is None or torch.is_grad_enabled() or not sums.takes(x):
        return None
    return sums.start(x)


def small_gather(x: Tensor, group: ProcessGroup) -> list[Tensor] | None:
    """The contiguous `x` of every rank, in their order; None where the backend gathers it."""
    sums = _of_group.get(group)
    if sums is None or isinstance(sums, SymmetricMemorySums) or not sums.takes(x):
        return None
    return sums.gather(x)

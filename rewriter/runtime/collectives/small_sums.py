"""Ways of small all-reduces and gathers that are faster than the backend's, and the choice between them.

Between GPUs that NVLink joins it is one kernel that reads all ranks' memory: NCCL takes about 20 µs for the sum of a
decode step, a kernel that reads symmetric memory about half (https://github.com/yifuwang/symm-mem-recipes). Torch's
operator copies the tensor to this rank's symmetric buffer, waits for the peers, and adds all buffers in the order of
ranks: all ranks get the same bits. Torch calls the interface alpha, and no GPU has measured it here, so that it is used
only where REWRITER_SYMMETRIC_MEMORY=1 says so.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rewriter.runtime.collectives import shared_memory_sum, socket_sum
from rewriter.runtime.collectives.shared_memory_sum import SharedMemorySum, SharedMemorySums
from rewriter.runtime.collectives.socket_sum import SocketSum, SocketSums

LARGEST = 256 * 1024  # bytes of a tensor that goes through symmetric memory
_RANKS = range(2, 9)
_ALIGNED = 16  # bytes: the kernel reads vectors of so many
_DTYPES = (torch.bfloat16, torch.float32)


def why_not_symmetric(group: ProcessGroup, device: torch.device) -> str | None:
    """Reason why sums of `group` do not go through symmetric memory; None where they can.

    Equal on all its ranks, which run one program on one node.
    """
    if os.environ.get("REWRITER_SYMMETRIC_MEMORY") != "1":
        return "REWRITER_SYMMETRIC_MEMORY is not 1"
    if device.type != "cuda" or "nccl" not in dist.get_backend(group):
        return "the ranks are not on GPUs with NCCL"
    if group.size() not in _RANKS:
        return f"{group.size()} ranks, expected 2 to 8"
    if not hasattr(torch.ops.symm_mem, "one_shot_all_reduce_copy_out"):
        return "this torch has no symm_mem::one_shot_all_reduce_copy_out"
    return None


class SymmetricMemorySums:
    """The symmetric buffers of `group`, one for each dtype. All ranks make it together: it is a rendezvous."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self.name, self.device = group.group_name, device
        self.buffers: dict[torch.dtype, Tensor] = {}
        for dtype in _DTYPES:
            buffer = symmetric_memory.empty(LARGEST // dtype.itemsize, dtype=dtype, device=device)
            symmetric_memory.rendezvous(buffer, group)
            self.buffers[dtype] = buffer
        # All sums on one stream, one after the other, so that one buffer serves them; a small kernel must not queue
        # behind a product's blocks.
        self.stream = torch.cuda.Stream(device, priority=-1)

    def takes(self, x: Tensor) -> bool:
        return x.dtype in self.buffers and 0 < x.nbytes <= LARGEST and x.nbytes % _ALIGNED == 0

    def start(self, x: Tensor) -> tuple[Tensor, SymmetricMemorySum]:
        """Begin the sum of the contiguous `x`: (where it will be, what waits for it). Within a captured graph, too: the
        other stream forks from this one, and joins it in the wait."""
        out, current = torch.empty_like(x), torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            all_reduce_once(self.buffers[x.dtype][: x.numel()], x.view(-1), self.name, out.view(-1))
            arrived = torch.cuda.Event()
            arrived.record()
        return out, SymmetricMemorySum(x, arrived)


@dataclass(eq=False)
class SymmetricMemorySum:
    """A sum between its start and its wait. It holds `x`, which is read until then."""

    x: Tensor | None
    arrived: torch.cuda.Event

    def wait(self) -> bool:
        """The current stream waits, not the host."""
        assert self.x is not None, "a sum is awaited once"
        torch.cuda.current_stream(self.x.device).wait_event(self.arrived)
        self.x = None
        return True


def all_reduce_once(buffer: Tensor, x: Tensor, name: str, out: Tensor) -> None:
    """Torch's operator: alpha, so it is called here alone."""
    torch.ops.symm_mem.one_shot_all_reduce_copy_out(buffer, x, "sum", name, out)


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
    if why_not_symmetric(group, device) is None:
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

"""All-reduces of small tensors between GPUs that NVLink joins, by one kernel that reads all ranks' memory.

NCCL takes about 20 µs for the sum of a decode step, a kernel that reads symmetric memory about half
(https://github.com/yifuwang/symm-mem-recipes). Torch's operator copies the tensor to this rank's symmetric buffer,
waits for the peers, and adds all buffers in the order of ranks: all ranks get the same bits. Torch calls the interface
alpha, and no GPU has measured it here, so that it is used only where REWRITER_SYMMETRIC_MEMORY=1 says so.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

LARGEST = 256 * 1024  # bytes of a tensor that goes this way
_RANKS = range(2, 9)
_ALIGNED = 16  # bytes: the kernel reads vectors of so many
_DTYPES = (torch.bfloat16, torch.float32)


def why_not(group: ProcessGroup, device: torch.device) -> str | None:
    """Why sums of `group` do not go this way; None where they can. Equal on all its ranks, which run one program on
    one node."""
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

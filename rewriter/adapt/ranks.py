"""The processes of one run: the rows of a batch that a rank computes, and what ranks exchange."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rewriter.common.errors import RewriterError


@dataclass(frozen=True)
class RunRanks:
    """This process among all. `replicas` see different rows, of which this is number `replica`; `within` ranks, which
    are neighbours, share the rows of one replica (tp × sp)."""

    rank: int = 0
    world: int = 1
    within: int = 1

    @property
    def replicas(self) -> int:
        return self.world // self.within

    @property
    def replica(self) -> int:
        return self.rank // self.within

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def group(self) -> ProcessGroup | None:
        """All ranks; None for a single one."""
        return None if self.world == 1 else dist.group.WORLD

    def mesh(self, device: torch.device) -> DeviceMesh | None:
        """All ranks as one dimension "dp"; None for a single one."""
        return None if self.world == 1 else init_device_mesh(device.type, (self.world,), mesh_dim_names=("dp",))

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def sum(self, x: torch.Tensor, group: ProcessGroup | None = None) -> torch.Tensor:
        """The sum over the group (all ranks by default), in place."""
        if self.world > 1:
            dist.all_reduce(x, group=group)
        return x

    def same(self, value: Any) -> Any:
        """Rank 0's `value`, on every rank."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def on_first(self, work: Callable[[], Any]) -> Any:
        """Rank 0's `work()`, on every rank; its error on every rank, where it fails."""
        result, error = None, None
        if self.first:
            try:
                result = work()
            except Exception as caught:
                error = caught
        result, message = self.same((result, None if error is None else f"{type(error).__name__}: {error}"))
        if error is not None:
            raise error
        if message is not None:
            raise RewriterError(f"rank 0 failed: {message}")
        return result


def join(within: int, device: torch.device, ep: int = 1) -> RunRanks:
    """Join the process group that torchrun describes, if it started this process and there is none yet.

    Raises RewriterError where the number of processes is not a multiple of `within` and of `ep`.
    """
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    for multiple, shared in (
        (within, f"--tp × --sp = {within} ranks share the rows of a batch"),
        (ep, f"--ep {ep} ranks share the experts of a layer"),
    ):
        if world % multiple:
            raise RewriterError(
                f"{shared}, but {world} run{'s' * (world == 1)}. Start it with torchrun --nproc-per-node {multiple}, "
                f"or a multiple of {multiple} for data parallelism"
            )
    if world == 1:
        return RunRanks()
    if not dist.is_initialized():
        if device.type == "cuda":
            dist.init_process_group("nccl", device_id=device)
        else:
            dist.init_process_group("gloo")
    return RunRanks(dist.get_rank(), world, within)


def leave() -> None:
    """Leave the process group, where there is one, together with the other ranks. A process that ends within it may be
    aborted by a thread of it that still runs."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()

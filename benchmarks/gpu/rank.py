"""Ranks for `run.py`: each computes attention of its own tokens; the pieces are put together."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed import ProcessGroup

from rewriter.ir.ops import MaskSpec, SequencePlan
from rewriter.ir.sequence_plan import join_tokens, take_tokens
from rewriter.runtime import sequence_mesh
from rewriter.runtime.attention.sequence_axis import SequenceAxis
from rewriter.runtime.attention.sequence_op import sequence_attention
from rewriter.runtime.collectives import exchange


def plans(ranks: int) -> list[SequencePlan]:
    """Attention2D with and without overlap, a ring, and Ulysses."""
    rows = 2 if ranks % 4 == 0 else 1
    grid = (1, rows, ranks // rows)
    found = [SequencePlan("attention2d", grid, overlap) for overlap in (False, True)]
    return [*found, SequencePlan("ring", (1, ranks, 1)), SequencePlan("ulysses", (ranks, 1, 1))]


def launch(plan: SequencePlan, inputs: list[Tensor], device: str, own_gpus: bool) -> list[Tensor]:
    """(o, dq, dk, dv) on the CPU from q, k, v and do, causal, computed by `plan.ranks` processes: each on a GPU of its
    own with NCCL, or all on one device, with messages that `stage` sends."""
    with tempfile.TemporaryDirectory() as scratch:
        mp.spawn(_rank, (plan, inputs, device, own_gpus, scratch), nprocs=plan.ranks)
        by_rank = [torch.load(os.path.join(scratch, f"{rank}.pt")) for rank in range(plan.ranks)]
    length = inputs[0].shape[2]
    return [join_tokens(list(parts), 2, plan.layout, length) for parts in zip(*by_rank, strict=True)]


def _rank(rank: int, plan: SequencePlan, inputs: list[Tensor], device: str, own_gpus: bool, scratch: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    where = torch.device("cuda", rank) if own_gpus else torch.device(device)
    if own_gpus:
        torch.cuda.set_device(where)
    else:
        stage()
    dist.init_process_group(
        "nccl" if own_gpus else "gloo",
        rank=rank,
        world_size=plan.ranks,
        store=dist.FileStore(os.path.join(scratch, "store"), plan.ranks),
        timeout=timedelta(seconds=40),  # a backend that cannot do something may wait for ever
        device_id=where if own_gpus else None,
    )
    try:
        # of gloo's groups the mesh is the CPU's, wherever the tensors lie
        key = SequenceAxis(sequence_mesh("cuda" if own_gpus else "cpu", plan.grid), plan).key
        own = [take_tokens(x, 2, plan.layout, rank, plan.ranks).to(where) for x in inputs]
        q, k, v = (x.requires_grad_() for x in own[:3])
        o = sequence_attention(
            q, k, v, key, mask=MaskSpec("causal"), scale=q.shape[-1] ** -0.5, length=inputs[0].shape[2]
        )
        found = [o.detach(), *torch.autograd.grad(o, (q, k, v), own[3])]
        torch.save([x.cpu() for x in found], os.path.join(scratch, f"{rank}.pt"))
        dist.barrier()
    finally:
        dist.destroy_process_group()


@dataclass
class Staged:
    """Messages between copies on the CPU; `wait` brings what arrived to the device."""

    works: list[Any]
    arriving: list[tuple[Tensor, Tensor]]  # (on the device, on the CPU)
    leaving: list[Tensor]  # copies that must live until they are sent

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        for there, here in self.arriving:
            there.copy_(here)


def stage() -> None:
    """From now on this process sends its messages from copies on the CPU: gloo's are of CPU tensors only, and NCCL
    refuses ranks that share a GPU."""
    begin = exchange._start

    def start(sends: dict[int, Tensor], receives: dict[int, Tensor], group: ProcessGroup | None) -> list[Any]:
        leaving = {rank: buffer.to("cpu", copy=True) for rank, buffer in sends.items()}
        arriving = {rank: torch.empty_like(buffer, device="cpu") for rank, buffer in receives.items()}
        pairs = [(buffer, arriving[rank]) for rank, buffer in receives.items()]
        return [Staged(begin(leaving, arriving, group), pairs, list(leaving.values()))]

    def gather(found: Tensor, own: Tensor, group: ProcessGroup, async_op: bool) -> Staged:
        leaving, arriving = own.to("cpu", copy=True), torch.empty_like(found, device="cpu")
        work = dist.all_gather(list(arriving.chunk(group.size())), leaving, group=group, async_op=async_op)
        return Staged([work], [(found, arriving)], [leaving])

    exchange._start, exchange.all_gather_flat = start, gather

"""Ranks that share one device, for `gpu.py`: each computes attention of its own tokens; the pieces are put together."""

from __future__ import annotations

import os
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from rewriter.ops import MaskSpec, SequencePlan
from rewriter.runtime import sequence_mesh
from rewriter.runtime.attention.grid import Grid
from rewriter.runtime.attention.layout import join_tokens, take_tokens
from rewriter.runtime.attention.sequence_op import register, sequence_attention


def plans(ranks: int) -> list[SequencePlan]:
    """Attention2D with and without overlap, a ring, and Ulysses."""
    rows = 2 if ranks % 4 == 0 else 1
    grid = (1, rows, ranks // rows)
    found = [SequencePlan("attention2d", grid, overlap) for overlap in (False, True)]
    return [*found, SequencePlan("ring", (1, ranks, 1)), SequencePlan("ulysses", (ranks, 1, 1))]


def launch(plan: SequencePlan, inputs: list[Tensor], device: str) -> list[Tensor]:
    """(o, dq, dk, dv) on the CPU from q, k, v and do, causal, computed by `plan.ranks` processes on one device."""
    with tempfile.TemporaryDirectory() as scratch:
        mp.spawn(_rank, (plan, inputs, device, scratch), nprocs=plan.ranks)
        by_rank = [torch.load(os.path.join(scratch, f"{rank}.pt")) for rank in range(plan.ranks)]
    length = inputs[0].shape[2]
    return [join_tokens(list(parts), 2, plan.layout, length) for parts in zip(*by_rank, strict=True)]


def _rank(rank: int, plan: SequencePlan, inputs: list[Tensor], device: str, scratch: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(os.path.join(scratch, "store"), plan.ranks)
    limit = timedelta(seconds=40)  # a backend that cannot do something may wait for ever
    dist.init_process_group("gloo", rank=rank, world_size=plan.ranks, store=store, timeout=limit)
    try:
        # the mesh knows the groups only; on which device tensors lie is their own matter
        key = register(plan, Grid.of(sequence_mesh("cpu", plan.grid)))
        own = [take_tokens(x, 2, plan.layout, rank, plan.ranks).to(device) for x in inputs]
        q, k, v = (x.requires_grad_() for x in own[:3])
        o = sequence_attention(
            q, k, v, key, mask=MaskSpec("causal"), scale=q.shape[-1] ** -0.5, length=inputs[0].shape[2]
        )
        found = [o.detach(), *torch.autograd.grad(o, (q, k, v), own[3])]
        torch.save([x.cpu() for x in found], os.path.join(scratch, f"{rank}.pt"))
        dist.barrier()
    finally:
        dist.destroy_process_group()

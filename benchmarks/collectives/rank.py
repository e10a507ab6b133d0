"""One rank of benchmarks/collectives/run.py: collectives of 2 nodes × 2 ranks, exact and quantized, timed in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.support.link_ranks import main, passed_bytes
from rewriter.runtime import record_events
from rewriter.runtime.quantized.launch import all_gather, all_reduce_start, reduce_scatter

EXACT = "exact"
AXES = ("node", "local")


def on_link(spec: dict[str, Any], rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, spec["ranks"] // 2), mesh_dim_names=AXES)
    return measure(mesh, spec["elements"], spec["formats"], spec["repetitions"], passed_bytes)


def measure(
    mesh: DeviceMesh, elements: int, formats: list[str], repetitions: int, link_bytes: Callable[[], int]
) -> dict[str, Any]:
    """Per collective and format: (begin, end) of each repetition, on the clock that all ranks of a machine share, what
    this rank sends to other nodes, what its node's interface passed meanwhile, and the error. Of all-reduces also the
    part of that time which remains where as much computation stands between start and wait."""
    found: dict[str, Any] = {}
    for collective, ways in calls(mesh, elements, formats).items():
        exact = ways[EXACT]().float()
        for format, call in ways.items():
            y = call().float()  # the first call connects, and makes the thread and its groups
            error = ((y - exact).norm() / exact.norm()).item()
            found[f"{collective} {format}"] = {"times": [], "link": [], "error": error}
        for _ in range(repetitions):
            for format, call in ways.items():
                case = found[f"{collective} {format}"]
                dist.barrier()
                before = link_bytes()
                dist.barrier()
                with record_events() as events:
                    begin = time.perf_counter()
                    call()
                    synchronize(mesh)
                    end = time.perf_counter()
                dist.barrier()
                case["times"].append((begin, end))
                case["link"].append(link_bytes() - before)
                case["sent"] = sum(event.sent for event in events if event.kind == "wire" and event.axis == AXES[0])
    for format, start in early(mesh, elements, formats).items():
        case = found[f"all_reduce {format}"]
        alone = statistics.median(end - begin for begin, end in case["times"])
        start().wait()
        case["exposed"] = []
        for _ in range(repetitions):
            dist.barrier()
            begin = time.perf_counter()
            pending = start()
            time.sleep(alone)  # computation, on processors that the ranks of this machine do not share
            pending.wait()
            synchronize(mesh)
            case["exposed"].append((time.perf_counter() - begin) / alone - 1)
    return found


def early(mesh: DeviceMesh, elements: int, formats: list[str]) -> dict[str, Callable[[], Any]]:
    """{format: what starts an all-reduce that is waited for later}."""
    whole = torch.randn(elements).bfloat16().to(mesh.device_type)
    quantized = {f: partial(all_reduce_start, whole, mesh, f) for f in formats}
    return {EXACT: partial(dist.all_reduce, torch.zeros_like(whole), async_op=True), **quantized}


def calls(mesh: DeviceMesh, elements: int, formats: list[str]) -> dict[str, dict[str, Callable[[], Tensor]]]:
    """{collective: {format: what runs it}} on `elements` bf16 numbers, those of the whole."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    whole = torch.randn(elements, generator=generator).bfloat16().to(mesh.device_type)
    shard = whole[: elements // ranks].clone()
    total, own, all_of = whole.clone(), torch.empty_like(shard), torch.empty_like(whole)

    def exact_all_reduce() -> Tensor:
        total.copy_(whole)
        dist.all_reduce(total)
        return total

    def exact_reduce_scatter() -> Tensor:
        dist.reduce_scatter_tensor(own, whole)
        return own

    def exact_all_gather() -> Tensor:
        dist.all_gather_into_tensor(all_of, shard)
        return all_of

    def flat(run: Callable[[], Tensor]) -> Tensor:
        return run().view(-1)

    def all_reduce(format: str) -> Tensor:
        y: Tensor = all_reduce_start(whole, mesh, format, wait=True).wait()
        return y

    found: dict[str, dict[str, Callable[[], Tensor]]] = {
        "all_reduce": {EXACT: exact_all_reduce},
        "reduce_scatter": {EXACT: exact_reduce_scatter},
        "all_gather": {EXACT: exact_all_gather},
    }
    for f in formats:
        for collective, run in {
            "all_reduce": partial(all_reduce, f),
            "reduce_scatter": partial(reduce_scatter, whole, mesh, f),
            "all_gather": partial(all_gather, shard, mesh, f, dtype=torch.bfloat16),
        }.items():
            found[collective][f] = partial(flat, run)
    return found


def synchronize(mesh: DeviceMesh) -> None:
    if mesh.device_type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(on_link)

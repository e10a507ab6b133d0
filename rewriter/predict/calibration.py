"""A fabric measured where it runs: collectives by size between this job's ranks, and what a rank computes with.

Of each collective its duration where ranks wait for it, and on CPUs also where they compute meanwhile, and what it then
takes of a rank's core (see `timing`).
"""

from __future__ import annotations

import os
import re
import socket
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from rewriter.common.errors import RewriterError
from rewriter.common.processes import local_rank
from rewriter.fabric import SOCKETS, Kind
from rewriter.fabric.tables import Curve, CurvePoint
from rewriter.fabric.writing import measured_points, name_of, short, to_yaml
from rewriter.predict.machine import device_section
from rewriter.predict.timing import StartCollective, beside_computation, durations, mean, own_device, own_seconds
from rewriter.runtime.collectives.process_groups import of_all
from rewriter.runtime.collectives.small_sums import connect_small_sums, small_gather, small_sum_start, small_sums_take

COLLECTIVES: tuple[Kind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
KINDS: tuple[Kind, ...] = (*COLLECTIVES, "broadcast", "send")
SMALLEST, LARGEST = 1 << 10, 64 << 20
REPETITIONS = 200  # at most; the time of large messages allows for fewer

# Named anew in torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_ROUNDS = 3


@dataclass(frozen=True)
class Measurement:
    """One collective at one size: the median of several rounds. `taken`: the largest, see `MeasuredDurations`.
    `library`: the backend, or `SOCKETS`."""

    kind: Kind
    ranks: int
    point: CurvePoint
    taken: float
    library: str


def sizes(largest: int = LARGEST) -> tuple[int, ...]:
    return tuple(SMALLEST << step for step in range(64) if SMALLEST << step <= largest)


def measure(kinds: Sequence[Kind], wanted: Sequence[int], repetitions: int = REPETITIONS) -> list[Measurement]:
    """Times collectives of float32 among all ranks of the default group, which must be initialised; every rank gets the
    same result. `send` is what nccl-tests' sendrecv is: every rank sends to the next one and receives from the one
    before, as rings and quantized sums do. Rounds have connections and threads of their own, as launches of a program
    have.

    A collective that the backend does not have is left out. On CPUs the runtime's own sums and gathers of small tensors
    are measured, too: programs take those.
    """
    rounds, device = min(_ROUNDS, repetitions), own_device()
    shared = device.type != "cuda" and _share_cores()
    by_size: dict[tuple[str, Kind, int], list[Measurement]] = {}
    for _ in range(rounds):
        group = dist.new_group()
        try:
            connected = connect_small_sums(group, device)
            for kind in kinds:
                for nbytes in wanted:
                    calls: dict[str, StartCollective] = {dist.get_backend(): _collective(kind, nbytes, device, group)}
                    if connected and (small := _small(kind, nbytes, group)) is not None:
                        calls[SOCKETS] = small
                    for library, run in calls.items():
                        one = _measured(kind, nbytes, library, run, -(-repetitions // rounds), shared)
                        if one is not None:
                            by_size.setdefault((library, kind, nbytes), []).append(one)
        finally:
            dist.destroy_process_group(group)
    return [
        replace(every[0], point=Curve.of(one.point for one in every).points[0], taken=max(m.taken for m in every))
        for every in by_size.values()
    ]


def _measured(
    kind: Kind, nbytes: int, library: str, run: StartCollective, repetitions: int, shared: bool
) -> Measurement | None:
    """None where the backend has no such collective. `shared`: ranks share cores."""
    device = own_device()
    try:
        run().wait()
    except (RuntimeError, NotImplementedError) as error:
        if not re.search("not (support|implement)", str(error), re.IGNORECASE):
            raise
        return None
    rooted = kind == "broadcast"  # not every rank waits for another one
    timed = durations(run, repetitions, device, rooted, shared, library == SOCKETS)
    typical = mean(timed.seconds)
    cpu = busy = 0.0
    if library == SOCKETS:  # what is under way there needs no thread
        typical += timed.call  # emulated ranks do not make this call
        cpu = own_seconds(run, typical, repetitions) if kind == "all_reduce" else timed.call
    elif device.type != "cuda":
        cpu, busy = beside_computation(run, typical, repetitions, rooted, shared)
        if kind == "send":  # it takes a rank's core for one message that leaves and one that arrives
            cpu /= 2
    point = CurvePoint(nbytes, typical, min(cpu, typical), busy if busy > typical else 0.0)
    return Measurement(kind, dist.get_world_size(), point, timed.taken, library)


def calibrated(
    out: Path, largest: int = LARGEST, repetitions: int = REPETITIONS, kinds: Sequence[Kind] = KINDS
) -> tuple[str, float]:
    """The YAML of a fabric of this job's ranks, and the share of time in which something else had their cores (the
    median over sizes, see `Measurement`). Every rank calls it. Starts the default process group where there is none
    (NCCL with one GPU per rank, else gloo, each rank on its share of the host's cores), and ends it then.

    Raises RewriterError for a job of one rank.
    """
    started = not dist.is_initialized()
    if started:
        cuda = torch.cuda.is_available() and torch.cuda.device_count() >= _local_ranks()
        if cuda:
            torch.cuda.set_device(local_rank())
        else:
            _keep_to_own_cores()
        dist.init_process_group("nccl" if cuda else "gloo")
    try:
        if dist.get_world_size() < 2:
            raise RewriterError("calibrate: one rank has no collectives. Start at least two (--ranks 2).")
        measured = measure(kinds, sizes(largest), repetitions)
        device = device_section(own_device(), _source())
        return to_yaml(_file(out, measured, device)), statistics.median(one.taken for one in measured)
    finally:
        if started:
            dist.destroy_process_group()


def _file(out: Path, measured: Sequence[Measurement], device: dict[str, Any]) -> dict[str, Any]:
    ranks, source = dist.get_world_size(), _source()
    gathers = Curve.of(o.point for o in measured if o.kind == "all_gather" and o.library != SOCKETS)
    first, last = gathers.points[0], gathers.points[-1]
    slope = max((last.seconds - first.seconds) / (last.nbytes - first.nbytes), 1e-15)
    fitted = f"between all-gathers of {first.nbytes} and {last.nbytes} bytes; {source}"
    kinds = ", ".join(dict.fromkeys(one.kind for one in measured))
    return {
        "name": name_of(out),
        "summary": f"{ranks} ranks of {socket.gethostname()[:60]} by {dist.get_backend()}: {kinds}, measured",
        "modelled": False,
        "device": device,
        "node": {"value": 1, "source": "each rank is a node: ranks are joined as they were measured"},
        "between": {
            "latency": {"value": short(gathers.latency / (ranks - 1)), "source": f"the smallest all-gather; {source}"},
            "bandwidth": {"value": short((ranks - 1) / ranks / slope), "source": fitted},
        },
        "model": "measured",
        "measurements": [
            {
                "library": library,
                **({"most_bytes": {"value": _largest(measured), "source": source}} if library == SOCKETS else {}),
                "version": str(torch.__version__),
                "dtype": "float32",
                "source": source,
                "points": measured_points((o.kind, o.ranks, o.point) for o in measured if o.library == library),
            }
            for library in dict.fromkeys(one.library for one in measured)
        ],
    }


def _largest(measured: Sequence[Measurement]) -> int:
    """Bytes of the largest message that went through sockets."""
    return max(one.point.nbytes for one in measured if one.library == SOCKETS)


@torch.no_grad()
def _small(kind: Kind, nbytes: int, group: Any) -> StartCollective | None:
    """Starts the runtime's own sum, or gather (decode steps gather what others broadcast). None where it has none, or
    the tensor is too large."""
    ranks, done = dist.get_world_size(), SimpleNamespace(wait=lambda: None)
    x = torch.zeros(max(1, nbytes // 4 // (ranks if kind == "all_gather" else 1)))
    gather = kind in ("all_gather", "broadcast")
    if not small_sums_take(x, group) or not (gather or kind == "all_reduce"):
        return None

    @torch.no_grad()
    def run() -> Any:
        return (small_gather(x, group) and done) if gather else small_sum_start(x, group)

    return run


def _collective(kind: Kind, nbytes: int, device: torch.device, group: Any) -> StartCollective:
    """Starts the collective once and returns its handle. `nbytes` is counted as in `rewriter.fabric.Call`."""
    ranks = dist.get_world_size()
    whole = torch.zeros(max(ranks, nbytes // 4 // ranks * ranks), device=device)
    part = torch.zeros(whole.numel() // ranks, device=device)
    other = torch.zeros_like(whole)
    calls: dict[Kind, StartCollective] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group, async_op=True),
        "all_gather": lambda: _all_gather(whole, part, group=group, async_op=True),
        "reduce_scatter": lambda: _reduce_scatter(part, whole, group=group, async_op=True),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group, async_op=True),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group, async_op=True),
        "send": lambda: _shift(whole, other, group),
    }
    return calls[kind]


def _shift(here: torch.Tensor, there: torch.Tensor, group: Any) -> Any:
    """A message from every rank to the next one: receives first, as the runtime begins them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    receive = dist.P2POp(dist.irecv, there, (rank - 1) % ranks, group)
    send = dist.P2POp(dist.isend, here, (rank + 1) % ranks, group)
    works = dist.batch_isend_irecv([receive, send])
    return SimpleNamespace(wait=lambda: [work.wait() for work in works])


def _keep_to_own_cores() -> None:
    """Ranks of one host share its cores out, if it has one for each: what a collective takes, it takes of its rank."""
    if not hasattr(os, "sched_setaffinity"):
        return
    cores, ranks = sorted(os.sched_getaffinity(0)), _local_ranks()
    each = len(cores) // ranks
    if ranks > 1 and each:
        os.sched_setaffinity(0, cores[local_rank() * each :][:each])


def _local_ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


def _share_cores() -> bool:
    """True where a host has more ranks than cores for them."""
    world = dist.group.WORLD
    assert world is not None  # `measure` asks for it
    every = of_all(world, (socket.gethostname(), sorted(os.sched_getaffinity(0))))
    hosts = [host for host, _ in every]
    return any(hosts.count(one) > len({core for host, own in every if host == one for core in own}) for one in hosts)


def _source() -> str:
    return f"measured {date.today()}, torch {torch.__version__}"

"""A fabric measured where it runs: collectives by size between this job's ranks, and what a rank computes with.

A collective's duration is from the last rank's arrival to the last rank's completion. Ranks arrive as in a program:
after a computation of their own, not in a loop of collectives: a link's buckets are full again, threads sleep. The
figure is the mean of repetitions without the longest tenth: a step has many collectives, and what counts is their sum,
also where durations lie around two values (a library's thread that is woken at once, or by the scheduler's next turn).

On the CPU a second figure is what the collective takes of the rank's core: how much longer a fixed computation takes
beside it than alone. That is the time of the library's threads, of the kernel's work for the network, and of lost
caches; an emulation spends as much.
"""

from __future__ import annotations

import math
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rewriter.errors import RewriterError
from rewriter.fabric import Kind
from rewriter.fabric.curves import Curve, Point
from rewriter.fabric.writing import measured_points, name_of, short, to_yaml
from rewriter.predict.machine import device_section

KINDS: tuple[Kind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
SMALLEST, LARGEST = 1 << 10, 64 << 20

# Named anew in torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_BETWEEN = 3e-3  # seconds of the computation before each repetition
_LONGEST = 6.0  # seconds for one size of one collective, after which fewer repetitions must do
_FEWEST = 5


@dataclass(frozen=True)
class Measurement:
    """One collective at one size. `spread`: the middle half's width over the median."""

    kind: Kind
    ranks: int
    point: Point
    spread: float


def sizes(largest: int = LARGEST) -> tuple[int, ...]:
    """1 KB to `largest` bytes, doubling."""
    return tuple(SMALLEST << step for step in range(64) if SMALLEST << step <= largest)


def measure(
    kinds: Sequence[Kind] = KINDS, wanted: Sequence[int] | None = None, repetitions: int = 30
) -> Iterator[Measurement]:
    """Times collectives of float32 among all ranks of the default group, which must be initialised; every rank gets the
    same result. `send` is half of a round trip between ranks 0 and 1.

    A collective that the backend does not have is left out.
    """
    device = _device()
    for kind in kinds:
        for nbytes in sizes() if wanted is None else wanted:
            run = _collective(kind, nbytes, device)
            try:
                run().wait()
            except (RuntimeError, NotImplementedError) as error:
                if "not support" not in str(error).lower() and "not implement" not in str(error).lower():
                    raise
                break
            seconds = _durations(run, repetitions, device, halves=kind == "send")
            median, typical = statistics.median(seconds), trimmed_mean(seconds)
            low, _, high = statistics.quantiles(seconds, n=4)
            cpu = 0.0 if device.type == "cuda" or kind == "send" else _lost(run, typical, repetitions)
            yield Measurement(
                kind, dist.get_world_size(), Point(nbytes, typical, min(cpu, typical)), (high - low) / median
            )


def calibrated(out: Path, largest: int = LARGEST, repetitions: int = 30) -> tuple[str, float]:
    """The YAML of a fabric of this job's ranks, and the spread of its measurements (the median over sizes, see
    `Measurement`). Every rank calls it. Starts the default process group where there is none (NCCL with one GPU per
    rank, else gloo, each rank on its share of the host's cores), and ends it then.

    Raises RewriterError for a job of one rank.
    """
    started = not dist.is_initialized()
    if started:
        cuda = torch.cuda.is_available() and torch.cuda.device_count() >= _local_ranks()
        if cuda:
            torch.cuda.set_device(_local_rank())
        else:
            _keep_to_own_cores()
        dist.init_process_group("nccl" if cuda else "gloo")
    try:
        if dist.get_world_size() < 2:
            raise RewriterError("calibrate: one rank has no collectives. Start at least two (--ranks 2).")
        found = list(measure(KINDS, sizes(largest), repetitions))
        device = device_section(_device(), _source())
        spread = statistics.median(one.spread for one in found)
        return to_yaml(_file(out, found, device, spread)), spread
    finally:
        if started:
            dist.destroy_process_group()


def _file(out: Path, found: Sequence[Measurement], device: dict[str, Any], spread: float) -> dict[str, Any]:
    ranks, source = dist.get_world_size(), _source()
    gathers = Curve.of(one.point for one in found if one.kind == "all_gather")
    first, last = gathers.points[0], gathers.points[-1]
    slope = max((last.seconds - first.seconds) / (last.nbytes - first.nbytes), 1e-15)
    fitted = f"between all-gathers of {first.nbytes} and {last.nbytes} bytes; {source}"
    kinds = ", ".join(dict.fromkeys(one.kind for one in found))
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
        "measurements": {
            "library": dist.get_backend(),
            "version": str(torch.__version__),
            "dtype": "float32",
            "source": f"{source}; the middle half of repetitions lies within {100 * spread:.0f} % (median over sizes)",
            "points": measured_points((one.kind, one.ranks, one.point) for one in found),
        },
    }


def _collective(kind: Kind, nbytes: int, device: torch.device) -> Callable[[], Any]:
    """Starts the collective once and returns its handle. `nbytes` is counted as in `rewriter.fabric.Call`."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.zeros(max(ranks, nbytes // 4 // ranks * ranks), device=device)
    part = torch.zeros(whole.numel() // ranks, device=device)
    other = torch.zeros_like(whole)
    if kind == "send":
        return lambda: _RoundTrip(whole, other) if rank < 2 else _Nothing()
    calls: dict[Kind, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole, async_op=True),
        "all_gather": lambda: _all_gather(whole, part, async_op=True),
        "reduce_scatter": lambda: _reduce_scatter(part, whole, async_op=True),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, async_op=True),
        "broadcast": lambda: dist.broadcast(whole, 0, async_op=True),
    }
    return calls[kind]


class _Nothing:
    def wait(self) -> None:
        pass


class _RoundTrip(_Nothing):
    def __init__(self, here: torch.Tensor, there: torch.Tensor) -> None:
        first = dist.get_rank() == 0
        steps = (dist.send, dist.recv) if first else (dist.recv, dist.send)
        for step, tensor in zip(steps, (here, there) if first else (there, here), strict=True):
            step(tensor, 1 if first else 0)


def _durations(run: Callable[[], Any], repetitions: int, device: torch.device, halves: bool) -> list[float]:
    """Seconds of each repetition, the same on every rank."""
    warm = max(2, repetitions // 10)
    starts, ends = [], []
    begun, planned, done = time.monotonic(), warm + repetitions, 0
    while done < planned:
        dist.barrier()
        _compute(_BETWEEN)
        if device.type == "cuda":
            torch.cuda.synchronize()
        starts.append(time.monotonic())
        run().wait()
        if device.type == "cuda":
            torch.cuda.synchronize()
        ends.append(time.monotonic())
        done += 1
        if done == warm:
            planned = min(planned, warm + _affordable((time.monotonic() - begun) / warm, repetitions))
    mine = torch.tensor([starts[warm:], ends[warm:]], dtype=torch.float64)
    every = _gathered(mine)
    if len(set(_gathered_hosts())) > 1:  # clocks of several hosts cannot be compared
        waits = every[:, 1] - every[:, 0]
        seconds = (waits[:2] if halves else waits).amin(0)  # the last to arrive waits least; of a message, its ends
    else:
        seconds = every[:, 1].amax(0) - every[:, 0].amax(0)
    return [float(value) / (2 if halves else 1) for value in seconds]


def _lost(run: Callable[[], Any], seconds: float, repetitions: int) -> float:
    """Seconds of a computation somewhat longer than the collective, beside it less alone: the mean over ranks."""
    length = max(2e-3, 1.5 * seconds)
    units = _compute(length)
    count = _affordable(2 * length + seconds, max(_FEWEST, repetitions // 3))
    lost = []
    for _ in range(count):
        dist.barrier()
        begun = time.monotonic()
        _work(units)
        alone = time.monotonic() - begun
        dist.barrier()
        begun = time.monotonic()
        work = run()
        _work(units)
        lost.append(time.monotonic() - begun - alone)
        work.wait()
    mine = torch.tensor([max(0.0, trimmed_mean(lost))], dtype=torch.float64)
    return float(_gathered(mine).mean())


def trimmed_mean(values: Sequence[float]) -> float:
    """Of all but the longest tenth, which something else has disturbed."""
    return statistics.fmean(sorted(values)[: max(1, math.ceil(0.9 * len(values)))])


def _affordable(each: float, wanted: int) -> int:
    return int(_agreed(max(_FEWEST, min(wanted, _LONGEST / max(each, 1e-9)))))


def _agreed(value: float) -> float:
    """The least of all ranks' values."""
    return float(_gathered(torch.tensor([value], dtype=torch.float64)).amin())


def _gathered(mine: torch.Tensor) -> torch.Tensor:
    """All ranks' tensors, stacked, on the CPU."""
    device = _device()
    every = [torch.empty_like(mine, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine.to(device))
    return torch.stack(every).cpu()


def _gathered_hosts() -> list[str]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, _boot())
    return found


def _boot() -> str:
    """What tells one running system from another: names may be equal, and differ between namespaces of one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        return socket.gethostname()


_MATRIX = torch.ones(96, 96)


def _work(units: int) -> None:
    for _ in range(units):
        torch.mm(_MATRIX, _MATRIX)


def _compute(seconds: float) -> int:
    """Compute for so long; how many units of work that was."""
    units, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        _work(1)
        units += 1
    return max(1, units)


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def _keep_to_own_cores() -> None:
    """Ranks of one host share its cores out, if it has one for each: what a collective takes, it takes of its rank."""
    if not hasattr(os, "sched_setaffinity"):
        return
    cores, ranks = sorted(os.sched_getaffinity(0)), _local_ranks()
    each = len(cores) // ranks
    if ranks > 1 and each:
        os.sched_setaffinity(0, cores[_local_rank() * each :][:each])


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _local_ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


def _source() -> str:
    return f"measured {date.today()}, torch {torch.__version__}"

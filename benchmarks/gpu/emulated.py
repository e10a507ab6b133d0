"""Section emulated of `run.py`: collectives of one rank in an emulated job take the time they are told, eager and in
CUDA graphs, and take multiprocessors from what runs beside them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

import rewriter.emulation  # the backend is registered
from benchmarks.gpu.report import CYCLES_PER_SECOND, SLEEP_CYCLES, Row, Scale, Table
from rewriter.emulation.backend import DelayEngines
from rewriter.fabric import Call, Delay

_ = rewriter.emulation
RANKS = 8
OPERATIONS = 50
LAUNCH = 2e-6  # seconds between two kernels that no graph holds: 1.0 to 1.6 µs on an H100
ROUNDS = 5  # of a product beside a collective
DELAYS = (5e-6, 20e-6, 100e-6, 1e-3, 10e-3)
# A product of one wave needs a second one, however few multiprocessors it loses: about twice as long (NVIDIA forum
# 337991: 80 to 47 % MFU beside NCCL)
SLOWER = (1.5, 2.6)


class Constant:
    """Every collective takes as long, on `blocks` blocks."""

    def __init__(self, seconds: float, blocks: int = 1, memory_bytes: int = 0) -> None:
        self.answer = Delay(seconds, seconds, ("nvlink",), blocks=blocks, memory_bytes=memory_bytes)

    def delay(self, call: Call) -> Delay:
        return self.answer


@contextlib.contextmanager
def job(model: Constant) -> Iterator[DelayEngines]:
    engines = DelayEngines(model)
    dist.init_process_group("emulated", rank=0, world_size=RANKS, store=dist.HashStore(), pg_options=engines)
    try:
        yield engines
    finally:
        dist.destroy_process_group()


def emulated(scale: Scale) -> Table:
    table = scale.table("Emulated collectives", ("what", "asked for", "found", "result"))
    table.attempt("steps of the clock", functools.partial(resolution, scale))
    for seconds in scale.pick(DELAYS, DELAYS[-2:-1]):
        table.attempt("duration, eager", functools.partial(eager, scale, seconds))
        table.attempt("duration, in a CUDA graph", functools.partial(graphed, scale, seconds))
    table.attempt("another delay in the same graph", functools.partial(changed, scale))
    table.attempt("sums after `wait`", functools.partial(sums, scale))
    for blocks in (1, 24):
        table.attempt(f"a matrix product beside {blocks} blocks", functools.partial(product, scale, blocks))
    return table


def resolution(scale: Scale) -> Row:
    """The smallest step of %globaltimer: durations cannot be exacter."""
    if scale.device.type == "cuda":
        import triton
        import triton.language as tl

        from rewriter.kernels.hold_triton import clock

        @triton.jit
        def look(out, COUNT: tl.constexpr):
            for i in range(COUNT):
                tl.store(out + i, clock())

        seen = torch.zeros(4096, dtype=torch.int64, device=scale.device)
        look[(1,)](seen, len(seen), num_warps=1)
        steps = seen.diff().cpu()
    else:
        steps = torch.tensor([time.monotonic_ns() for _ in range(64)]).diff()
    smallest = int(steps[steps > 0].min())
    wrong = "" if scale.tiny or smallest <= 1100 else "durations under 100 µs are not exact to 1 %"
    return ("≤ 1 µs", f"{smallest} ns"), wrong


def verdict(scale: Scale, asked: float, found: float, least: float = 1e-6) -> Row:
    limit = max(least, 0.01 * asked)
    wrong = "" if scale.tiny or abs(found - asked) <= limit else f"off by {1e6 * (found - asked):+.2f} µs"
    return (f"{1e6 * asked:g} µs", f"{1e6 * found:.2f} µs"), wrong


def each(scale: Scale, run: Callable[[], object]) -> float:
    """Seconds of each of OPERATIONS collectives that `run` starts, one after the other on the device, which is kept
    busy until all are in its queue."""
    found = []
    for _ in range(scale.pick(7, 1)):
        if scale.device.type != "cuda":
            begun = time.perf_counter()
            run()
            found.append(time.perf_counter() - begun)
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(40_000_000)  # cycles: some 20 ms
        begin.record()
        run()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(found) / count(scale)


def count(scale: Scale) -> int:
    return int(scale.pick(OPERATIONS, 2))


def collectives(scale: Scale) -> Callable[[], None]:
    x = torch.ones(8192, dtype=torch.bfloat16, device=scale.device)

    def run() -> None:
        for _ in range(count(scale)):
            dist.all_reduce(x)

    return run


def eager(scale: Scale, seconds: float) -> Row:
    with job(Constant(seconds)):
        run = collectives(scale)
        run()
        return verdict(scale, seconds, each(scale, run), LAUNCH)


def captured(scale: Scale) -> Callable[[], object]:
    """`collectives` as a graph; without a GPU as they are."""
    run = collectives(scale)
    run()
    if scale.device.type != "cuda":
        return run
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    return graph.replay


def graphed(scale: Scale, seconds: float) -> Row:
    with job(Constant(seconds)):
        return verdict(scale, seconds, each(scale, captured(scale)))


def changed(scale: Scale) -> Row:
    with job(Constant(20e-6)) as engines:
        replay = captured(scale)
        engines.change(Constant(200e-6))
        return verdict(scale, 200e-6, each(scale, replay))


def sums(scale: Scale) -> Row:
    """An asynchronous sum of what another kernel writes late, read by a third: streams wait for each other."""
    with job(Constant(1e-3)):
        x = torch.ones(1 << 16, device=scale.device)
        if scale.device.type == "cuda":
            torch.cuda._sleep(2_000_000)
        x += 1
        work = dist.all_reduce(x, async_op=True)
        begun = time.perf_counter()
        if scale.device.type == "cuda":
            work.wait()
        host = time.perf_counter() - begun
        work.wait()
        found = (x + 1).unique().tolist()
    wrong = "" if found == [2.0 * RANKS + 1] and host < 1e-3 else f"{found}, the host waited {1e3 * host:.1f} ms"
    return (str(2.0 * RANKS + 1), str(found[0])), wrong


def product(scale: Scale, blocks: int) -> Row:
    """A product with a tile for each multiprocessor, alone and beside an all-gather; one that loses some of them needs
    another wave."""
    cuda = scale.device.type == "cuda"
    processors = torch.cuda.get_device_properties().multi_processor_count if cuda else 4
    high = next(d for d in range(int(processors**0.5), 0, -1) if processors % d == 0)
    dtype = torch.bfloat16 if cuda else torch.float32
    a = torch.randn(128 * high, scale.pick(8192, 16), device=scale.device, dtype=dtype)
    b = torch.randn(a.shape[1], 256 * (processors // high), device=scale.device, dtype=dtype)
    alone = scale.seconds(lambda: a @ b)
    # longer than the products, and what passes time in front of them
    lasts = max(40 * alone, 1e-3) + 4 * SLEEP_CYCLES / CYCLES_PER_SECOND
    with job(Constant(lasts, blocks, int(lasts * 400e9 * blocks / 24))):  # its memory traffic is that of 24 channels
        shard = torch.ones(scale.pick(1 << 20, 16), device=scale.device)
        whole = torch.empty(RANKS * shard.numel(), device=scale.device)
        gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(whole, shard)  # compiles, measures launches
        scale.synchronize()
        work = gather(whole, shard, async_op=True)
        together = products(scale, lambda: a @ b)
        work.wait()
    factor = together / alone
    least, most = SLOWER
    wrong = "" if scale.tiny or least <= factor <= most else "not what was published"
    return (f"{least} to {most} ×", f"{factor:.2f} ×, from {1e6 * alone:.0f} µs"), wrong


def products(scale: Scale, call: Callable[[], object]) -> float:
    """The median time of a call of ROUNDS, all in the queue before the first runs. The device is waited for only
    afterwards: what runs beside them would be waited for, too."""
    if not scale.cuda:
        return scale.seconds(call, rounds=ROUNDS)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS + 1)]
    torch.cuda._sleep(SLEEP_CYCLES)
    for event in events[:-1]:
        event.record()
        call()
    events[-1].record()
    events[-1].synchronize()
    return statistics.median(a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events))

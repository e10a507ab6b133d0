"""Collectives timed between this job's ranks, as programs meet them: after computation, and next to it.

Ranks compute between repetitions for about as long as the collective takes, each time somewhat longer or shorter:
programs for which a collective matters are like that, and it matters that they are. A link's token buckets are full
again after a pause. On a CPU, the library's threads sleep, and whether they are woken at once depends on what their
core does: gloo's loop thread, when it takes the core from a thread that holds its lock, spins until the kernel's next
tick. So a small message takes .3 ms or 2 to 4, and how often which depends on the rhythm of the program.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

_PAUSES = (1e-3, 15e-3)  # seconds: the shortest and longest computations between repetitions, on average
_LONGEST = 1.0  # seconds for one size of one collective, after which fewer repetitions must do
_FEWEST = 3

StartCollective = Callable[[], Any]  # starts a collective once and returns its handle


@dataclass(frozen=True)
class MeasuredDurations:
    """Seconds of each repetition, the same on every rank. `taken`: the share of the ranks' computations between
    repetitions in which they did not have their core: something else runs there. `call`: CPU seconds of the call that
    starts it, which come before."""

    seconds: tuple[float, ...]
    taken: float
    call: float


def durations(
    run: StartCollective,
    repetitions: int,
    device: torch.device,
    rooted: bool = False,
    shared: bool = False,
    sockets: bool = False,
) -> MeasuredDurations:
    """Repetitions of a collective whose ranks wait for it, each from the moment at which a rank's call has reached the
    library to that rank's completion, on average over ranks. So a rank's wait for others, whose computations took
    longer, is part of it, as in nccl-tests' averages: a program has it as well.

    `rooted`: not every rank waits for another one, as in a broadcast; all meet before each repetition, and the longest
    wait counts. `shared`: ranks of one host share cores. Then computations end far apart, as those of a program do, and
    a duration is from the last rank's arrival. `sockets`: and the last one waits for nobody, since what the others sent
    lies there. So it is the others' time that counts, who find a core free: all meet before the next computation.
    """
    warm = max(2, min(10, repetitions // 10))
    starts: list[float] = []
    ends: list[float] = []
    calls: list[float] = []  # CPU seconds until the library has it, which an emulated program takes as well

    def repeat(times: int, pause: float) -> _Pauses:
        pauses = _Pauses(pause)
        for _ in range(times):
            if rooted or (shared and sockets):
                dist.barrier()
            pauses.compute()
            if device.type == "cuda":
                torch.cuda.synchronize()
            starts.append(time.monotonic())
            busy = time.thread_time()
            work = run()
            calls.append(time.thread_time() - busy)
            work.wait()
            if device.type == "cuda":
                torch.cuda.synchronize()
            ends.append(time.monotonic())
        return pauses

    repeat(warm, _PAUSES[0])
    typical = agreed(statistics.median(end - start for start, end in zip(starts, ends, strict=True)))
    pause = _pause(typical)
    begun = len(starts)
    pauses = repeat(_affordable(pause + typical, repetitions), pause)
    waited = _waits(starts[begun:], ends[begun:], rooted, shared, sockets)
    call = agreed(statistics.median(calls[begun:]))
    return MeasuredDurations(tuple(max(seconds - call, 1e-7) for seconds in waited), agreed(pauses.taken), call)


def beside_computation(
    run: StartCollective, typical: float, repetitions: int, rooted: bool, shared: bool = False
) -> tuple[float, float]:
    """(CPU seconds, seconds) of a collective whose ranks compute until it is over; `typical` seconds are its duration
    where they wait, with the same `rooted`.

    Ranks compute for `typical` seconds and then wait for the rest r: the collective has gone on at the rate that is
    asked for, then at the one that is known, so 1 / seconds = (1 - r / typical) / typical. CPU seconds are those in
    which a rank's thread that computes does not have its core: it belongs to the library's threads, or to the kernel
    that serves the network. Means over repetitions and ranks. Where ranks share cores (`shared`), other ranks have
    them, too: CPU seconds are those of this process's other threads, and it takes as long as where ranks wait.
    """
    clock = time.process_time if shared else time.monotonic
    pauses = _Pauses(_pause(typical))
    starts, ends, lost = [], [], []
    for _ in range(_affordable(_pause(typical) + 1.5 * typical, repetitions)):
        pauses.compute()
        begin, whole, busy = time.monotonic(), clock(), time.thread_time()
        work = run()
        while time.monotonic() - begin < typical:
            _work(1)
        lost.append(max(0.0, clock() - whole - (time.thread_time() - busy)))
        work.wait()
        starts.append(begin)
        ends.append(time.monotonic())
    rest = 0.0 if shared else max(0.0, mean(_waits(starts, ends, rooted, False)) - typical)
    slower = 1 / max(0.1, 1 - rest / typical)
    taken = float(_gathered(torch.tensor([mean(lost)], dtype=torch.float64)).mean())
    return taken * slower, typical * slower


def own_seconds(run: StartCollective, typical: float, repetitions: int) -> float:
    """Seconds that a rank spends on a collective that the kernel does meanwhile: to start it, and to take its result,
    three durations later."""
    taken = []
    for _ in range(_affordable(3 * typical, repetitions)):
        begin = time.monotonic()
        work = run()
        started = time.monotonic()
        while (now := time.monotonic()) - begin < 3 * typical:
            _work(1)
        work.wait()
        taken.append(started - begin + time.monotonic() - now)
    return agreed(statistics.median(taken))


def mean(values: Sequence[float]) -> float:
    """Mean of all but the longest fiftieth, which something else has disturbed: a step has many collectives, and what
    counts is their sum, also where durations are around two values."""
    return statistics.fmean(sorted(values)[: len(values) - len(values) // 50])


def agreed(value: float) -> float:
    """The largest of all ranks' values."""
    return float(_gathered(torch.tensor([value], dtype=torch.float64)).amax())


def own_device() -> torch.device:
    """The device that the default group's collectives work on."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def _waits(
    starts: Sequence[float], ends: Sequence[float], longest: bool, shared: bool, sockets: bool = False
) -> list[float]:
    """For each repetition the mean of the ranks' own seconds, or the longest of them. Clocks of several hosts are not
    compared: only where ranks of one share cores are seconds those since the last start, through `sockets` of the ranks
    that were not the last."""
    begun, ended = (_gathered(torch.tensor(times, dtype=torch.float64)) for times in (starts, ends))
    every = ended - (begun.amax(0) if shared else begun)
    if shared and sockets:
        waiting = torch.ones_like(every).scatter_(0, begun.argmax(0, keepdim=True), 0)
        return ((every * waiting).sum(0) / waiting.sum(0)).tolist()
    return (every.amax(0) if longest else every.mean(0)).tolist()


def _affordable(each: float, wanted: int) -> int:
    return int(max(_FEWEST, min(wanted, _LONGEST / agreed(max(each, 1e-9)))))


def _gathered(mine: torch.Tensor) -> torch.Tensor:
    device = own_device()
    every = [torch.empty_like(mine, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine.to(device))
    return torch.stack(every).cpu()


# --- computing ---

_MATRIX = torch.ones(96, 96)


def _work(units: int) -> None:
    for _ in range(units):
        torch.mm(_MATRIX, _MATRIX)


def _pause(typical: float) -> float:
    return min(max(typical, _PAUSES[0]), _PAUSES[1])


class _Pauses:
    """Computations of half to one and a half times `seconds`, as many units of work on every rank."""

    def __init__(self, seconds: float) -> None:
        self._draws = random.Random(0)
        self._passed = self._computed = 0.0
        begun = time.thread_time()
        _work(20)
        self._units = seconds / agreed((time.thread_time() - begun) / 20)

    def compute(self) -> None:
        begun, busy = time.monotonic(), time.thread_time()
        _work(max(1, math.ceil(self._units * self._draws.uniform(0.5, 1.5))))
        self._passed += time.monotonic() - begun
        self._computed += time.thread_time() - busy

    @property
    def taken(self) -> float:
        """The share of these computations in which the thread did not have its core."""
        return max(0.0, 1 - self._computed / self._passed) if self._passed else 0.0

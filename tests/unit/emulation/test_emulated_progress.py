"""How far operations are whose rank computes for some of the time: `CpuProgress`, on clocks of the test's own."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from emulated import Constant, job

from rewriter.emulation import cpu_progress as module
from rewriter.emulation.cpu_progress import CpuProgress
from rewriter.fabric import Delay


@dataclass
class Clocks:
    """`now`: of the wall; `cpu`: of the program."""

    now: float = 100.0
    cpu: float = 0.0

    def compute(self, seconds: float) -> None:
        self.now += seconds
        self.cpu += seconds

    def idle(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    made = Clocks()
    monkeypatch.setattr(module.time, "monotonic", lambda: made.now)
    monkeypatch.setattr(module._Callers, "_read", lambda self: made.cpu)
    return made


def delay(seconds: float, hindrance: float = 0.0, transfer: float = 0.0, links: tuple[str, ...] = ()) -> Delay:
    return Delay(seconds, transfer, links, hindrance=hindrance)


def test_what_is_waited_for_takes_its_seconds(clocks: Clocks) -> None:
    progress = CpuProgress()
    one = progress.begin(clocks.now, delay(10, 30))
    assert progress.end(one) == pytest.approx(110)
    clocks.idle(4)
    assert progress.share(one) == pytest.approx(0.4)
    assert progress.end(one) == pytest.approx(110)
    clocks.idle(6)
    assert progress.share(one) == 1
    clocks.compute(50)
    assert progress.end(one) == pytest.approx(110)


def test_beside_computation_it_takes_longer(clocks: Clocks) -> None:
    progress = CpuProgress()
    one = progress.begin(clocks.now, delay(10, 30))
    clocks.compute(20)  # half of the 40 that it takes so
    assert progress.share(one) == pytest.approx(0.5)
    assert progress.end(one) == pytest.approx(125)  # the rest at the other rate
    clocks.idle(2.5)
    clocks.compute(10)
    assert progress.share(one) == 1
    assert progress.end(one) == pytest.approx(132.5)


def test_a_thread_that_watches_the_clock_does_not_compute(clocks: Clocks) -> None:
    progress = CpuProgress()
    one = progress.begin(clocks.now, delay(10, 30))
    with progress.waiting():
        clocks.compute(4)
    assert progress.share(one) == pytest.approx(0.4)
    clocks.compute(8)
    progress.spent(4)  # by the emulation: half of the time was computed
    assert progress.share(one) == pytest.approx(0.4 + 8 * (0.5 / 10 + 0.5 / 40))


def test_links_are_held_for_transfers_and_streams_to_the_end(clocks: Clocks) -> None:
    progress = CpuProgress()
    first = progress.begin(100, delay(10, transfer=6, links=("a", "b")))
    second = progress.begin(101, delay(10, transfer=2, links=("b",)))
    elsewhere = progress.begin(101, delay(1, links=("c",)))
    assert progress.start(elsewhere) == 101
    assert progress.start(second) == pytest.approx(106)
    assert progress.end(second) == pytest.approx(116)
    clocks.idle(30)
    assert (progress.end(first), progress.end(second)) == (pytest.approx(110), pytest.approx(116))
    on_stream = [progress.begin(clocks.now, delay(3), "group") for _ in range(2)]
    assert progress.start(on_stream[1]) == progress.end(on_stream[0]) == pytest.approx(133)


def test_what_is_queued_starts_when_the_hindered_one_before_it_is_through(clocks: Clocks) -> None:
    progress = CpuProgress()
    first, second = (progress.begin(100, delay(10, 30, transfer=10, links=("a",))) for _ in range(2))
    clocks.compute(40)  # the first's whole time
    assert progress.end(first) == pytest.approx(140)
    clocks.compute(20)
    assert progress.share(second) == pytest.approx(0.5)
    assert progress.end(second) == pytest.approx(165)


def test_an_operation_that_arrived_before_the_last_look_has_gone_on_since(clocks: Clocks) -> None:
    progress = CpuProgress()
    other = progress.begin(100, delay(50))
    clocks.idle(5)
    progress.share(other)
    late = progress.begin(103, delay(10))  # another thread's
    assert progress.share(late) == pytest.approx(0.2)
    assert progress.end(late) == pytest.approx(113)


def test_against_small_steps(clocks: Clocks) -> None:
    """An independent simulation that lets every operation go on by hundredths."""
    draw = random.Random(5)
    for _ in range(40):
        clocks.now, clocks.cpu = 100.0, 0.0
        progress, tick = CpuProgress(), 0.01
        waiting: list[dict] = []
        works = []
        for _ in range(draw.randrange(2, 9)):
            links = tuple(name for name in "ab" if draw.random() < 0.6)
            seconds, hindrance = draw.uniform(1, 5), draw.choice([0.0, draw.uniform(0, 10)])
            transfer = seconds * draw.random()
            works.append(progress.begin(clocks.now, delay(seconds, hindrance, transfer, links)))
            waiting.append({"links": links, "s": seconds, "h": hindrance, "t": transfer / seconds, "done": None})
            computes, length = draw.random() < 0.5, round(draw.uniform(0, 4), 2)
            (clocks.compute if computes else clocks.idle)(length)
            if draw.random() < 0.7:
                progress.share(works[0])
            _small_steps(waiting, length, tick, computes)
        expected = [0.0 if one["done"] is None else min(1.0, one["done"]) for one in waiting]
        assert [progress.share(work) for work in works] == pytest.approx(expected, abs=0.05)


def _small_steps(works: list[dict], length: float, tick: float, computes: bool) -> None:
    for _ in range(round(length / tick)):
        for number, one in enumerate(works):
            held = {link for other in works[:number] if (other["done"] or 0) < other["t"] for link in other["links"]}
            if one["done"] is None:
                if held & set(one["links"]):
                    continue
                one["done"] = 0.0
            one["done"] += tick / (one["s"] + one["h"] * computes)


# --- operations ---


@pytest.fixture
def computing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program has a core of its own and computes whenever it does not wait, also where this machine is busy."""
    monkeypatch.setattr(module._Callers, "_read", lambda self: time.monotonic())


@pytest.mark.parametrize("as_future", [False, True])
@pytest.mark.usefixtures("computing")
def test_a_program_that_computes_waits_longer(as_future: bool) -> None:
    """0.1 s alone, 60 s beside computation: nearly all is left after 0.2 s of it, and is done in 0.1 s of waiting. A
    future, on which nobody is seen to wait, takes 0.8 s in all."""
    with job(4, Constant(0.1, hindrance=0.7 if as_future else 59.9)):
        begun = time.monotonic()
        work = dist.all_reduce(torch.ones(8), async_op=True)
        called = time.monotonic()
        future = work.get_future() if as_future else None
        time.sleep(0.2)
        waits = time.monotonic()
        if future is None:
            assert not work.is_completed() or called - begun > 0.09
            work.wait()
            # The call may be held up before its thread's clock is read first, which counts as waiting.
            left = (1 - (called - begun) / 0.1 - (waits - called) / 60) * 0.1
            assert left - 0.005 < time.monotonic() - waits < 30
        else:  # nobody tells that the program waits for it; what the call itself took does not count
            future.wait()
            assert time.monotonic() - begun > 0.5


@pytest.mark.usefixtures("computing")
def test_what_is_waited_for_at_once_is_not_hindered() -> None:
    with job(4, Constant(0.05, hindrance=60.0)):
        begun = time.monotonic()
        dist.all_reduce(torch.ones(8))
        assert 0.049 < time.monotonic() - begun < 30

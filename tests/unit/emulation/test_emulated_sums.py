"""The runtime's own small sums where peers are emulated: what they take, what they give, and for how long."""

from __future__ import annotations

import socket
import time

import pytest
import torch
import torch.distributed as dist
from emulated import Constant, job

from rewriter.emulation.socket_sums import EmulatedSums, MeetingSums
from rewriter.fabric import SOCKETS, Link
from rewriter.fabric.alpha_beta import AlphaBeta
from rewriter.fabric.measured_delays import Best, MeasuredDelays
from rewriter.fabric.tables import Curve, CurvePoint, Table, TableKey
from rewriter.runtime.collectives.small_sums import (
    SocketSums,
    connect_small_sums,
    small_gather,
    small_sum_start,
    small_sums_take,
)


def table(library: str, **seconds: float) -> MeasuredDelays:
    """Measured among two ranks, of 1 kB and of 64 kB. `own`: seconds of the rank's core."""
    own = seconds.get("own", 0.0)
    curve = Curve((CurvePoint(1024, seconds["small"], own), CurvePoint(65536, seconds["large"], own)))
    key = TableKey("here", library, "1", library, False, "float32")
    curves = {(kind, 2): curve for kind in ("all_reduce", "all_gather")}
    return MeasuredDelays((Table(key, curves),), AlphaBeta(Link(1e-5, 1e9), Link(1e-5, 1e9), 1))


@pytest.fixture
def model() -> Best:
    tables = {"gloo": table("gloo", small=1e-3, large=3e-3), SOCKETS: table(SOCKETS, small=5e-4, large=2e-3, own=2e-4)}
    return Best(tables, {SOCKETS: 65536})


def test_small_sums_of_the_runtime_last_as_measured(model: Best) -> None:
    with job(2, model), torch.no_grad():
        group = dist.group.WORLD
        assert connect_small_sums(group, torch.device("cpu"))
        x = torch.arange(256.0)
        begin = time.monotonic()
        started = small_sum_start(x, group)
        assert started is not None
        assert time.monotonic() - begin >= 2e-4  # the rank sends
        started.wait()
        assert time.monotonic() - begin >= 5e-4
        assert x.tolist() == [2.0 * i for i in range(256)]
        begin = time.monotonic()
        parts = small_gather(torch.ones(128), group)  # 1,024 bytes gathered
        assert time.monotonic() - begin >= 5e-4
        assert parts is not None
        assert [part.tolist() for part in parts] == [[1.0] * 128] * 2


@pytest.mark.parametrize(
    ("count", "taken"),
    [(256, True), (16384, False), (65536, False), (0, False)],
    ids=["half a millisecond", "two milliseconds", "more than sockets take", "nothing"],
)
def test_long_sums_go_through_the_group(model: Best, count: int, taken: bool) -> None:
    """In it transfers wait for each other."""
    with job(2, model), torch.no_grad():
        connect_small_sums(dist.group.WORLD, torch.device("cpu"))
        assert small_sums_take(torch.zeros(count), dist.group.WORLD) is taken
        assert (small_sum_start(torch.zeros(count), dist.group.WORLD) is not None) is taken


def test_a_fabric_without_them_has_the_backends() -> None:
    with job(2, Constant(1e-5)), torch.no_grad():
        connect_small_sums(dist.group.WORLD, torch.device("cpu"))
        assert not small_sums_take(torch.zeros(8), dist.group.WORLD)


def test_sums_of_bfloat16_are_those_of_equal_ranks(model: Best) -> None:
    sums = EmulatedSums(range(3), lambda: model)
    x = torch.tensor([1.0, 257.0], dtype=torch.bfloat16)  # 257 rounds to 256
    assert sums.takes(x)
    sums.start(x).wait()
    assert x.tolist() == [3.0, 768.0]


def test_only_cpu_tensors_are_taken(model: Best) -> None:
    assert not EmulatedSums(range(2), lambda: model).takes(torch.empty(8, device="meta"))


def test_real_ranks_wait_for_the_last_which_waits_for_nobody(model: Best, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = socket.socketpair()
    first, second = (
        MeetingSums(range(2), lambda: model, met=SocketSums({1 - rank: ends[rank]}, rank, 1 << 16)) for rank in (0, 1)
    )
    x, y = torch.ones(256), torch.full((256,), 3.0)
    begun = first.start(x)
    time.sleep(0.02)
    late = time.monotonic()
    other = second.start(y)
    begun.wait()
    assert time.monotonic() - late >= 5e-4
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"the last waits {seconds} s"))
    other.wait()
    assert (x[0].item(), y[0].item()) == (2.0, 6.0)  # of a world of equal ranks
    [end.close() for end in ends]

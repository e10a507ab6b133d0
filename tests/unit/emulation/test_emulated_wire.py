"""The wire mode: real messages with an environment that plays all other ranks, along the collective's own graph."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from emulated import Constant, together
from job_processes import until

from rewriter.common.errors import RewriterError
from rewriter.emulation import cpu_progress
from rewriter.emulation.environment import Environment
from rewriter.emulation.exchange import _HEADER, ANNOUNCE, DATA, Announced, frame
from rewriter.emulation.operation import EmulatedOperation
from rewriter.emulation.plan import RANKS, SEGMENT, Plan, plan
from rewriter.emulation.wire_mode import WireEngine
from rewriter.emulation.work import CollectiveAborted
from rewriter.fabric import Call, Delay, Kind

KINDS: list[Kind] = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather"]
KINDS += ["scatter", "barrier"]


@contextmanager
def environment(model: Any = None) -> Iterator[str]:
    """An environment on a thread of this process; its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    served = Environment(listener, model)
    thread = threading.Thread(target=served.serve, daemon=True)
    host, port = listener.getsockname()
    thread.start()
    try:
        yield f"{host}:{port}"
    finally:
        served.stop()
        thread.join(300)
        assert not thread.is_alive()


@contextmanager
def engine(model: Any = None) -> Iterator[WireEngine]:
    with environment(model) as address:
        made = WireEngine(address, model=model)
        try:
            yield made
        finally:
            made.close()


def operation(kind: Kind, numel: int, ranks: Any, sequence: int = 0, rank: int = 0, **more: Any) -> EmulatedOperation:
    """One of float32 ones; `numel` as `Call.nbytes` counts them."""
    n, group = len(ranks), more.pop("group", "world")
    whole = torch.ones(numel)
    part = torch.ones(numel // n)
    inputs, outputs = {
        "all_gather": ((part,), (torch.empty(numel),)),
        "gather": ((part,), tuple(torch.empty(numel // n) for _ in range(n))),
        "reduce_scatter": ((whole,), (torch.empty(numel // n),)),
        "scatter": (tuple(torch.ones(numel // n) for _ in range(n)), (torch.empty(numel // n),)),
        "all_to_all": ((whole,), (torch.empty(numel),)),
        "send": ((whole,), ()) if rank == 0 else ((), (whole,)),
        "barrier": ((), ()),
    }.get(kind, ((whole,), (whole,)))
    root = 0 if kind in ("broadcast", "reduce", "gather", "scatter") else None
    call = Call(kind, 0 if kind == "barrier" else 4 * numel, ranks)
    return EmulatedOperation(
        call, group, sequence, rank, inputs, outputs, more.pop("timeout", 300.0), root=root, **more
    )


# --- plans ---


def gloo_ring(nbytes: int, item: int, n: int, rank: int, largest: int = 1 << 20) -> tuple[list[int], list[int]]:
    """Lengths of what a rank sends and receives in gloo's all-reduce: its loops, on the offsets that each step has."""
    segment = min((nbytes + 2 * n - 1) // (2 * n), largest // item * item)
    segment += -segment % item
    count = max((nbytes + segment - 1) // segment, 2 * n)
    count += -count % n
    sent, received = [], []
    for half in (1, 0):
        for i in range(count - count // n):
            send = ((rank + half) * (count // n) + i) * segment % (count * segment)
            receive = ((rank + half + 1) * (count // n) + i) * segment % (count * segment)
            sent.append(min(segment, nbytes - send))
            received.append(min(segment, nbytes - receive))
    return [x for x in sent if x > 0], [x for x in received if x > 0]


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("nbytes", [4, 1000, 1 << 16, (9 << 20) + 4])
def test_all_reduce_has_the_messages_of_gloos_ring(n: int, nbytes: int) -> None:
    for rank in range(n):
        found = plan("all_reduce", nbytes, 4, n, rank, None)
        sent, received = gloo_ring(nbytes, 4, n, rank)
        assert [m.length for m in found.sends] == sent
        assert [m.length for m in found.receives] == (received or [0])  # a rank that gets nothing is told of the end
        assert sum(m.reduced for m in found.receives) <= len(received) / 2 + n


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_messages_and_bytes_of_the_other_collectives(n: int) -> None:
    """Over all ranks, every byte that is sent is received, and as many as the algorithm needs travel."""
    nbytes = 840 * 4 * n
    shard = nbytes // n
    expected = {
        "all_gather": (2 * n * (n - 1), n * (n - 1) * shard),  # every shard passes n - 1 links, in halves
        "all_to_all": (n * (n - 1), n * (n - 1) * shard),
        "broadcast": (n - 1, (n - 1) * nbytes),  # a tree
        "gather": (n - 1, (n - 1) * shard),
        "scatter": (n - 1, (n - 1) * shard),
        "barrier": (n * (n - 1).bit_length(), 0),
    }
    for kind, (messages, total) in expected.items():
        plans = [plan(kind, 0 if kind == "barrier" else nbytes, 4, n, r, 1) for r in range(n)]  # type: ignore[arg-type]
        sent = [m for p in plans for m in p.sends]
        assert (len(sent), sum(m.length for m in sent)) == (messages, total), kind
        assert sum(p.received_bytes for p in plans) == total, kind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [2, 3, 7, 16, 8192])
def test_no_plan_waits_for_itself(kind: Kind, n: int) -> None:
    for rank in {0, 1, n // 2, n - 1}:
        for nbytes in (0, 4, 12, n * 4, (5 << 20) + 20):
            found = plan(kind, nbytes, 4, n, rank, 0)
            assert len(found.sends) + len(found.receives) < 1000
            assert played(found) == (len(found.sends), len(found.receives)), (rank, nbytes)


def played(found: Plan) -> tuple[int, int]:
    """How far rank and environment get if each sends what it may."""
    sent = received = 0
    while True:
        before = sent, received
        while sent < len(found.sends) and found.sends[sent].needs <= received:
            sent += 1
        while received < len(found.receives) and found.receives[received].needs <= sent:
            received += 1
        if (sent, received) == before:
            return before


def test_what_a_large_ring_carries_is_that_of_the_real_one() -> None:
    for n in (17, 1000, 8192):
        for kind, nbytes in (("all_reduce", 4 << 20), ("all_gather", n * 4096)):
            found = plan(kind, nbytes, 4, n, 5, None)  # type: ignore[arg-type]
            real = (2 if kind == "all_reduce" else 1) * nbytes * (n - 1) / n
            assert sum(m.length for m in found.sends) == pytest.approx(real, rel=0.001)


# --- over TCP ---


@pytest.mark.parametrize("n", [2, 4])
def test_every_collective_over_tcp_gives_the_values_of_uniform_ranks(n: int) -> None:
    with engine() as made:
        for sequence, kind in enumerate(KINDS):
            for numel in (4 * n, 3 * SEGMENT // 4):
                one = operation(kind, numel - numel % n, range(n), 2 * sequence + (numel > 100))
                assert made.submit(one).wait()
                value = n if kind in ("all_reduce", "reduce", "reduce_scatter") else 1
                assert all((out == value).all() for out in one.outputs), kind
        for rank in (0, 1):
            one = operation("send", 1000, (0, 1) if rank == 0 else (1, 0), 50 + rank, rank)
            assert made.submit(one).wait()


def test_dtypes_reductions_and_layouts() -> None:
    cases: list[tuple[torch.Tensor, str, Any]] = [
        (torch.full((999,), 3, dtype=torch.bfloat16), "sum", 9),
        (torch.full((7, 3), 2, dtype=torch.int64).t(), "max", 2),
        (torch.tensor(5.0), "avg", 5),
        (torch.full((9,), True), "bor", True),
        (torch.full((6,), 1 + 1j), "sum", 3 + 3j),
        (torch.full((513,), 7, dtype=torch.uint8), "min", 7),
        (torch.zeros(0), "sum", 0),
    ]
    with engine() as made:
        for sequence, (x, reduction, value) in enumerate(cases):
            call = Call("all_reduce", x.nbytes, range(3), str(x.dtype).removeprefix("torch."))
            one = EmulatedOperation(call, "world", sequence, 0, (x,), (x,), 300.0, reduction=reduction)  # type: ignore[arg-type]
            made.submit(one).wait()
            assert (x == value).all(), (x.dtype, reduction)


def test_operations_under_way_at_once() -> None:
    with engine() as made:
        large = made.submit(operation("all_gather", 8 << 20, range(2)))
        works = [made.submit(operation("all_reduce", 256, range(2), i, group=f"g{i % 3}")) for i in range(1, 7)]
        future = made.submit(operation("all_reduce", 256, range(2), 7)).get_future()
        assert all(work.wait() for work in works)
        assert (future.wait()[0] == 2).all()
        assert large.wait()


def test_a_collective_lasts_as_long_as_the_model_says_and_links_are_shared() -> None:
    with engine(Constant(0.03)) as made:
        begin = time.monotonic()
        works = [made.submit(operation("all_reduce", 3 * SEGMENT // 4, range(4), 0, group=g)) for g in ("a", "b")]
        works[0].wait()
        first = time.monotonic() - begin
        futures = [works[1].get_future(), made.submit(operation("barrier", 0, range(4), 1, group="c")).get_future()]
        futures[0].wait()
        second = time.monotonic() - begin
        futures[1].wait()
        third = time.monotonic() - begin
    # an operation's time counts from its announcement, which is late where the machine is busy
    assert first >= 0.03
    assert second >= 0.045
    assert third >= 0.075


@pytest.mark.parametrize("as_future", [False, True])
def test_a_rank_that_computes_hinders_its_operations(as_future: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.05 s alone, 60 s beside computation; of a future, on which nobody is seen to wait, 0.8 s. The program computes
    whenever it does not wait, also where this machine is busy."""
    monkeypatch.setattr(cpu_progress._Callers, "_read", lambda self: time.monotonic())
    with engine(Constant(0.05, hindrance=0.75 if as_future else 60.0)) as made:
        begun = time.monotonic()
        work = made.submit(operation("all_reduce", 3 * SEGMENT // 4, range(4)))
        called = time.monotonic()
        future = work.get_future() if as_future else None
        time.sleep(0.2)
        if future is None:
            assert not work.is_completed() or called - begun > 0.04  # the call itself counts as waiting
            work.wait()
            assert 0.2 < time.monotonic() - begun < 30
        else:  # nobody tells that the program waits for it
            future.wait()
            assert time.monotonic() - begun > 0.5


@contextmanager
def engines(address: str, real: tuple[int, ...]) -> Iterator[list[Any]]:
    found = list(together(partial(WireEngine, address), real).values())
    try:
        yield found
    finally:
        for made in found:
            made.close()


def test_real_ranks_wait_for_the_last_of_them_and_must_agree() -> None:
    with environment() as address, engines(address, (0, 4)) as (first, second):
        early = first.submit(operation("all_reduce", 64, range(8), 1, 0))
        alone = first.submit(operation("all_reduce", 64, range(4), 1, 0, group="half"))
        assert alone.wait()  # the other is not a member
        assert not early.is_completed()
        late = second.submit(operation("all_reduce", 64, range(8), 1, 4))
        assert early.wait()
        assert late.wait()
        message = first.submit(operation("send", 64, (0, 4), 2, 0)), second.submit(operation("send", 64, (0, 4), 2, 1))
        assert all(work.wait() for work in message)
        one = first.submit(operation("all_reduce", 64, range(8), 3, 0))
        other = second.submit(operation("broadcast", 64, range(8), 3, 4))
        for work, said in ((one, "rank 4 calls broadcast"), (other, "rank 0 calls all_reduce")):
            with pytest.raises(RewriterError, match=f"{said} of 256 bytes among 8 ranks"):
                work.wait()
        waiting = first.submit(operation("all_reduce", 64, range(8), 4, 0))
        second.close()
        with pytest.raises(CollectiveAborted, match="rank 4 has left the job"):
            waiting.wait()


class Broken:
    def delay(self, call: Call) -> Delay:
        raise RewriterError("no answer") if call.kind == "all_reduce" else ZeroDivisionError("of nothing")


def test_a_model_that_fails_fails_its_operation_on_all_real_ranks_and_no_other_job() -> None:
    with environment(Broken()) as address:
        for kind, said in (("all_reduce", "no answer"), ("broadcast", "ZeroDivisionError: of nothing")):
            with engines(address, (0, 1)) as both:
                works = [made.submit(operation(kind, 64, range(8), 1, rank)) for rank, made in enumerate(both)]  # type: ignore[arg-type]
                for work in works:
                    with pytest.raises(CollectiveAborted, match=said):
                        work.wait()


def reported(address: str, *messages: bytes) -> str:
    """The text of the error that the environment sends to who says this, after whatever else it sends."""
    host, port = address.split(":")
    connection = socket.create_connection((host, int(port)), timeout=300)
    for message in messages:
        connection.sendall(message)
    received = b""
    while more := connection.recv(1 << 16):
        received += more
    at = 0
    while _HEADER.unpack_from(received, at)[1] == DATA:
        at += _HEADER.size + _HEADER.unpack_from(received, at)[2]
    return received[at + _HEADER.size :].decode()


def announced(nbytes: int = 1024, rank: int = 0, ranks: int = 2) -> bytes:
    told = Announced("all_reduce", nbytes, 4, (0, ranks, 1), True, rank, None, "float32")
    return b"".join(frame(ANNOUNCE, told.packed()))


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([b"".join(frame(DATA, bytes(256)))], "no such operation"),
        ([announced(), b"".join(frame(DATA, bytes(255)))], "expected message 0, 256 bytes"),
        ([b"".join(frame(ANNOUNCE, b"what"))], "cannot be read"),
        ([_HEADER.pack(0x5202, ANNOUNCE, (1 << 32) - 1, 0)], "more than any has"),
        ([announced(1 << 60)], "cannot be read"),
        ([announced(rank=2)], "rank 2 of a group of 2"),
        ([announced(ranks=0)], "rank 0 of a group of 0"),
        ([b"GET / HTTP/1.1\r\n\r\n"], "another program"),
    ],
    ids=["unannounced", "length", "garbled", "endless", "without end", "no member", "no group", "another program"],
)
def test_a_wrong_message_is_reported_to_the_rank(messages: list[bytes], said: str) -> None:
    with environment() as address:
        assert said in reported(address, *messages)
        other = WireEngine(address)  # the environment goes on
        assert other.submit(operation("barrier", 0, range(2))).wait()
        other.close()


def test_an_environment_that_goes_away_fails_what_is_under_way_and_what_follows() -> None:
    with environment(Constant(30.0)) as address:
        made = WireEngine(address)
        work = made.submit(operation("all_reduce", 1 << 20, range(2)))
        future = made.submit(operation("all_reduce", 1 << 20, range(2), 1)).get_future()
        assert until(lambda: bool(made.connections))  # its thread connects
    with pytest.raises(CollectiveAborted, match=r"operation 0: all_reduce .* closed the connection"):
        work.wait()
    with pytest.raises(RuntimeError, match="closed the connection"):
        future.wait()
    with pytest.raises(CollectiveAborted, match="closed the connection"):
        made.submit(operation("barrier", 0, range(2), 2)).wait()
    made.close()


def test_an_operation_that_lasts_too_long_times_out() -> None:
    late = r"operation 3: all_reduce .* not done within 0\.2 s"
    with engine(Constant(3000.0)) as made, pytest.raises(RuntimeError, match=late):
        made.submit(operation("all_reduce", 1024, range(2), 3, timeout=0.2)).wait()


def test_addresses_and_devices_that_cannot_be() -> None:
    for address in ("somewhere", ":1", "host:port", "host:70000"):
        with pytest.raises(RewriterError, match="expected HOST:PORT"):
            WireEngine(address)
    x = torch.empty(4, device="meta")
    one = EmulatedOperation(Call("all_reduce", 16, range(2)), "world", 0, 0, (x,), (x,), 1.0)
    with pytest.raises(RewriterError, match="a tensor on meta"):
        WireEngine("127.0.0.1:1").submit(one)


def test_a_world_of_thousands_costs_as_much_as_one_of_eight() -> None:
    """Messages, and so what both ends do, are bounded; the group's ranks are told as a range."""
    counts = [len(plan("all_reduce", 1 << 16, 4, n, 3, None).sends) for n in (RANKS, 8192, 1 << 20)]
    assert counts[0] == counts[1] == counts[2]
    assert len(Announced.of(Call("all_reduce", 4, range(1 << 20)), 4, 0, None).packed()) < 200
    with engine() as made:
        one = operation("all_reduce", 1 << 14, range(8192))
        made.submit(one).wait()
        assert (one.outputs[0] == 8192).all()

"""Sums and gathers of small tensors through sockets: gloo's, to the bit on all ranks, in any order of starts and
waits."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from rewriter.runtime.collectives import small_sums
from rewriter.runtime.collectives.differentiable import all_gather, all_reduce, all_reduce_start
from rewriter.runtime.collectives.exchange import all_reduce_wait
from rewriter.runtime.collectives.small_sums import LARGEST, connect_small_sums, small_gather, small_sum_start

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
SHAPES = [(1,), (3, 5), (0,), (), (2, 1, 576), (LARGEST // 16,)]


def connect(group):
    return connect_small_sums(group, torch.device("cpu"))


def of_rank(rank, shape, dtype, turn):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * turn + rank)).to(dtype)


@torch.no_grad()
def sums(group):
    assert connect(group)
    found = []
    for turn, (shape, dtype) in enumerate(product(SHAPES, DTYPES)):
        assert (small_sum_start(torch.ones(shape), group) is None) == (0 in shape)
        x = of_rank(group.rank(), shape, dtype, turn)
        expected = x.double()
        dist.all_reduce(expected, group=group)
        summed = all_reduce(x, group)
        found.append((summed.data_ptr() == x.data_ptr(), summed, expected.to(dtype)))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_are_those_of_gloo_and_the_same_bits_everywhere(ranks):
    by_rank = run_ranks(sums, ranks)
    for found in by_rank:
        for (in_place, summed, expected), (_, first, _) in zip(found, by_rank[0], strict=True):
            assert in_place
            assert torch.equal(summed, first)
            torch.testing.assert_close(summed, expected)


@torch.no_grad()
def two_at_a_time(group):
    connect(group)
    x, found = of_rank(group.rank(), (64,), torch.float32, 0), []
    late = None
    for turn in range(40):  # as in a ladder: the next sum begins before the last one is awaited
        pending = all_reduce_start(x * turn, group)
        if late is not None:
            found.append(all_reduce_wait(late))
        late = pending
    return [*found, all_reduce_wait(late)]


def test_a_sum_may_begin_before_the_last_one_is_awaited():
    total = sum(of_rank(rank, (64,), torch.float32, 0) for rank in range(2))
    for found in run_ranks(two_at_a_time, 2):
        for turn, summed in enumerate(found):
            torch.testing.assert_close(summed, total * turn)


@torch.no_grad()
def many_at_once(group):
    """More than the buffers of the kernel hold, waited for from the last to the first by one rank."""
    connect(group)
    given = [torch.full((1 << 18,), float(turn + group.rank())) for turn in range(24)]
    pending = [all_reduce_start(x, group) for x in given]
    order = pending if group.rank() == 0 else pending[::-1]
    summed = {id(one): all_reduce_wait(one) for one in order}
    return [bool((summed[id(one)] == 2 * turn + 1).all()) for turn, one in enumerate(pending)]


def test_more_may_be_under_way_than_the_kernel_holds():
    assert run_ranks(many_at_once, 2) == [[True] * 24] * 2


@torch.no_grad()
def taken(group, ways):
    """Whether sockets take tensors of so many bytes."""
    connect(group)
    return [small_gather(torch.ones(size, dtype=torch.uint8), group) is not None for size in ways]


@pytest.mark.parametrize(("ranks", "largest"), [(2, 2 << 20), (3, small_sums.LARGEST // 2)])
def test_sockets_take_what_the_buffers_of_two_ranks_hold_and_little_of_more(ranks, largest):
    with socket.socket() as any_socket:
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            any_socket.setsockopt(socket.SOL_SOCKET, buffer, small_sums._PAIR_BUFFER)
        largest = min(largest, small_sums._room(any_socket) // 2)
    assert run_ranks(taken, ranks, (largest, largest + 1)) == [[True, False]] * ranks


@torch.no_grad()
def gathers(group):
    connect(group)
    own = torch.arange(6).reshape(2, 3) + 10 * group.rank()
    return small_gather(own, group), all_gather(own, group, -1), own


def test_gathers_have_every_rank_in_order():
    first = torch.arange(6).reshape(2, 3)
    wanted = [first, first + 10, first + 20]
    for rank, (parts, joined, own) in enumerate(run_ranks(gathers, 3)):
        assert all(torch.equal(part, one) for part, one in zip(parts, wanted, strict=True))
        assert torch.equal(joined, torch.cat(wanted, -1))
        assert torch.equal(own, wanted[rank])


def others(group):
    connect(group)
    large, traced = torch.ones(1 << 22), torch.ones(3, requires_grad=True)
    with torch.no_grad():
        small = small_sum_start(large, group)
        all_reduce(large, group)
    (all_reduce(traced * 2, group) ** 2).sum().backward()
    return small is None, bool((large == 2).all()), traced.grad


def test_large_tensors_and_gradients_go_through_gloo():
    for by_gloo, summed, gradient in run_ranks(others, 2):
        assert by_gloo
        assert summed
        assert gradient.tolist() == [16.0] * 3  # 2 · (2 ranks · 2) · 2, the identity through the sum


def unreachable(group, reason):
    if reason == "one has no address" and group.rank() == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "nothing0"
    if reason == "loopbacks of two hosts":
        small_sums.socket.gethostname = lambda: f"host{group.rank()}"
    if reason == "one cannot connect":
        small_sums._CONNECT = 0.5
        if group.rank() == 1:
            small_sums.socket.create_connection = lambda *a, **k: (_ for _ in ()).throw(ConnectionRefusedError())
    return connect(group), all_reduce(torch.ones(2), group).tolist()


@pytest.mark.parametrize("reason", ["one has no address", "one cannot connect", "loopbacks of two hosts"])
def test_ranks_that_cannot_all_connect_use_gloo(reason):
    assert run_ranks(unreachable, 2, reason) == [(False, [2.0, 2.0])] * 2


def test_a_stranger_who_calls_is_no_rank():
    listener = socket.create_server(("127.0.0.1", 0))
    address, word = listener.getsockname(), b"w" * 16
    with ThreadPoolExecutor() as pool, listener:
        made = pool.submit(small_sums._connected, listener, [address, ("127.0.0.1", 1)], 0, word)
        with socket.create_connection(address) as stranger:
            stranger.sendall(b"x" * 16 + (1).to_bytes(4, "big"))
            assert stranger.recv(1) == b"", "it is sent away"
        with socket.create_connection(address) as rank_1:
            rank_1.sendall(word + (1).to_bytes(4, "big"))
            found = made.result(10)
    assert list(found) == [1]
    found[1].close()


def waits_in_vain(group):
    small_sums._PATIENCE = 0.2
    connect(group)
    with torch.no_grad():
        pending = all_reduce_start(torch.ones(3), group) if group.rank() == 0 else None
        try:
            return None if pending is None else all_reduce_wait(pending)
        except TimeoutError as error:
            return str(error)


def test_a_rank_that_does_not_come_is_named():
    assert "rank 1 did not come" in run_ranks(waits_in_vain, 2)[0]


@torch.no_grad()
def ends(group):
    connect(group)
    if group.rank() == 1:
        small_sums._of_group[group].peers[0].connection.close()
        return None
    try:
        return all_reduce(torch.ones(3), group)
    except ConnectionError as error:
        return str(error)


def test_a_rank_that_has_ended_is_named():
    assert "rank 1 has ended" in run_ranks(ends, 2)[0]

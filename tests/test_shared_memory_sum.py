"""Sums of small tensors through memory that ranks of one host share: gloo's, to the bit on all ranks, in any order of
starts and waits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from rewriter.runtime import shared_memory_sum
from rewriter.runtime.collectives import all_reduce, all_reduce_start
from rewriter.runtime.pending_all_reduce import all_reduce_wait
from rewriter.runtime.shared_memory_sum import LARGEST
from rewriter.runtime.small_sums import choose_small_sums, small_sum_start

SHAPES = [(1,), (3, 5), (0,), (2, 1, 576), (LARGEST // 8,)]


def share_memory(group):
    return choose_small_sums(group, torch.device("cpu")) == "shared memory"


def of_rank(rank, shape, dtype, turn):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * turn + rank)).to(dtype)


@torch.no_grad()
def sums(group, dtype):
    shared, found = share_memory(group), []
    _, work = small_sum_start(torch.ones(1), group)
    work.wait()
    for turn, shape in enumerate(SHAPES * 5):  # more than there are slots
        x = of_rank(group.rank(), shape, dtype, turn)
        expected = x.double()
        dist.all_reduce(expected, group=group)
        summed = all_reduce(x, group)
        found.append((summed.data_ptr() == x.data_ptr(), summed, expected))
    return shared, type(work), found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_are_those_of_gloo_and_the_same_bits_everywhere(ranks, dtype):
    by_rank = run_ranks(sums, ranks, dtype)
    for shared, used, found in by_rank:
        assert (shared, used) == (True, shared_memory_sum.SharedMemorySum)
        for (in_place, summed, expected), (_, first, _) in zip(found, by_rank[0][2], strict=True):
            assert in_place
            assert torch.equal(summed, first)
            torch.testing.assert_close(summed, expected.to(dtype))


@torch.no_grad()
def two_at_a_time(group):
    share_memory(group)
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


def others(group):
    share_memory(group)
    large, traced = torch.ones(LARGEST // 4 + 1), torch.ones(3, requires_grad=True)
    with torch.no_grad():
        way = small_sum_start(large, group)
        all_reduce(large, group)
    (all_reduce(traced * 2, group) ** 2).sum().backward()
    return way is None, bool((large == 2).all()), traced.grad


def test_large_tensors_and_gradients_go_through_gloo():
    for by_gloo, summed, gradient in run_ranks(others, 2):
        assert by_gloo
        assert summed
        assert gradient.tolist() == [16.0] * 3  # 2 · (2 ranks · 2) · 2, the identity through the sum


def apart(group):
    shared_memory_sum._place = lambda: ("host", str(group.rank()))
    return share_memory(group)


def _files():
    return {path.name for path in Path("/dev/shm").glob("rewriter-sums-*") if os.access(path, os.R_OK)}


def test_ranks_of_other_hosts_and_namespaces_use_sockets():
    assert run_ranks(apart, 2) == [False, False]


def test_no_file_is_left():
    before = _files()
    assert run_ranks(share_memory, 2) == [True, True]
    assert _files() <= before


def waits_in_vain(group):
    shared_memory_sum._PATIENCE = 0.2
    share_memory(group)
    with torch.no_grad():
        pending = all_reduce_start(torch.ones(3), group) if group.rank() == 0 else None
        try:
            return None if pending is None else all_reduce_wait(pending)
        except TimeoutError as error:
            return str(error)


def test_a_rank_that_does_not_come_is_named():
    assert "rank 1 did not come" in run_ranks(waits_in_vain, 2)[0]

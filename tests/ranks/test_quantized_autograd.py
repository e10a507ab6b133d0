"""Quantized collectives as functions of tensors: gradients, compiled graphs, shapes, and sums started early."""

from __future__ import annotations

from datetime import timedelta
from functools import cache

import pytest
import torch
import torch.distributed as dist
from quantized_oracle import Oracle, differing, numbers, place
from ranks import run_ranks
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch.utils import _pytree as pytree

from rewriter.runtime import all_reduce_start, all_reduce_wait, mark, record_events
from rewriter.runtime.collectives import exchange, process_groups
from rewriter.runtime.quantized.launch import quantized_all_reduce, quantized_all_reduce_start
from rewriter.training.zero.nodes import node_groups


def used(x: Tensor, where) -> Tensor:
    """The sum of a transposed tensor of 5 × 8."""
    return quantized_all_reduce(x.T, where, format="int8")


def functions(group):
    """The sum, what backward gives for a gradient that differs by rank, and whether a graph gives the same bits with
    one node."""
    where, rank = place(group, (2, 2)), group.rank()
    x = numbers(rank, 8, 5).requires_grad_()
    y, g = used(x, where), numbers(10 + rank, 5, 8)
    (gradient,) = torch.autograd.grad(y, x, g)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    compiled = torch.compile(lambda x: used(x, where), fullgraph=True, backend=backend)(x)
    (again,) = torch.autograd.grad(compiled, x, g)
    same = torch.equal(compiled, y) and torch.equal(again, gradient)
    nodes = sum(str(node.target).startswith("rewriter.quantized") for node in graphs[0].graph.nodes)
    return y.detach(), torch.equal(gradient.T, g), same, nodes


def test_the_sum_its_gradient_and_its_graph():
    expected = Oracle(2, 2, "int8", "int8").all_reduce([numbers(rank, 8, 5).T.contiguous() for rank in range(4)])
    for y, identity, same, nodes in launched()[0]:
        assert y.shape == expected.shape
        assert y.is_contiguous()
        assert differing(y, expected) <= 0.03  # of 40 elements, one may lie on a tie
        assert identity
        assert same
        assert nodes == 1


def test_one_rank_needs_no_process_group():
    x = numbers(0, 300).requires_grad_()
    y = used(x.view(60, 5), None)
    assert torch.equal(y, x.view(60, 5).T)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, torch.ones(300))


def everything(group):
    dist.new_group([0])  # ranks belong to different numbers of groups, of which torch makes the names of new ones
    return functions(group), early(group)


@cache
def launched():
    return tuple(zip(*run_ranks(everything, 4), strict=True))


def early(group):
    mesh, rank = place(group, (2, 2)), group.rank()
    first, second = (numbers(rank + k, 3, 700).requires_grad_() for k in (0, 50))
    kept = first.detach().clone()
    with record_events() as events:
        pending = quantized_all_reduce_start(first, mesh, format="int8", name="first")
        exact = all_reduce_start(second.detach().clone(), group, "exact")
        other = quantized_all_reduce_start(second, group, format="int8", name="second")
        # messages among those that are under way
        now = [quantized_all_reduce(x, where, format="int8") for x in (first, second) for where in (mesh, group)]
        # Nobody waits, and yet both hops of both pass
        passed = [one.work.works[0].finished.wait(300) for one in (pending, other)]
        mark("computation")
        leaves, spec = pytree.tree_flatten(pending)
        unflattened = pytree.tree_unflatten(leaves, spec)
        two, exact, one = all_reduce_wait(other), all_reduce_wait(exact), all_reduce_wait(unflattened)
    g = numbers(rank + 10, 3, 700)
    (gradient,) = torch.autograd.grad(one, first, g)
    return {
        "passed": passed,
        "order": [(e.kind, e.name) for e in events if e.kind != "wire" and e.name],
        "bits": torch.equal(one, now[0]) and torch.equal(two, now[3]),
        "exact": (exact - sum(numbers(r + 50, 3, 700) for r in range(4))).abs().max() < 1e-4,
        "kept": torch.equal(first, kept),
        "identity": torch.equal(gradient, g),
        "again": all_reduce_wait(unflattened) is one,
        "alone": quantized_all_reduce_start(first, None, format="int8").value is first,
        "leaf": leaves == [first],
        "timeout": timeouts(group),
        "apart": groups_used(first) == [True, True, False, False],
    }


def timeouts(group):
    """True if a group and those made for zero_plus_plus have the timeout of the group they stand for."""
    given = dist.new_group(list(range(4)), timeout=timedelta(seconds=47))
    dist.new_group([0])  # ranks belong to different numbers of groups
    groups = (given, *node_groups(given, 2, "cpu").get_all_groups())
    return [process_groups._timeout(g).seconds for g in groups] == [47] * 3


def groups_used(x):
    """Whether two groups of the same ranks are kept apart: which of them messages travel in."""
    first, second = (dist.new_group(list(range(4))) for _ in range(2))
    used = []
    with pytest.MonkeyPatch.context() as patch:
        start = exchange._start
        patch.setattr(exchange, "_start", lambda *args: used.append(args[2] is first) or start(*args))
        for group in (first, second):
            quantized_all_reduce(x, group, format="int8")
    return used


def test_sums_started_early_need_nobody_until_they_are_waited_for():
    for found in launched()[1]:
        starts = [("start", "first"), ("start", "exact"), ("start", "second")]
        waits = [("wait", "second"), ("wait", "exact"), ("wait", "first")]
        assert found["order"] == [*starts, ("mark", "computation"), *waits]
        assert found["passed"] == [True, True]
        assert all(found.values()), found

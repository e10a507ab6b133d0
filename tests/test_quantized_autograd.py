"""Quantized collectives as functions of tensors: gradients, compiled graphs, shapes, and sums started early."""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from quantized_oracle import Oracle, differing, numbers, place
from ranks import run_ranks
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch.utils import _pytree as pytree

from rewriter.runtime import all_reduce_start, all_reduce_wait, exchange, mark, process_groups, record_events
from rewriter.runtime.quantized import topology
from rewriter.runtime.quantized.autograd import (
    quantized_all_gather,
    quantized_all_reduce,
    quantized_all_reduce_start,
    quantized_all_to_all,
    quantized_reduce_scatter,
)
from rewriter.training.zero.nodes import node_groups


def used(x: Tensor, where) -> dict[str, Tensor]:
    """Each function once, on a transposed tensor of 5 × 8."""
    return {
        "all_reduce": quantized_all_reduce(x.T, where, format="int8", stages=2),
        "reduce_scatter": quantized_reduce_scatter(x.T, where, format="int8"),
        "reduce_scatter -1": quantized_reduce_scatter(x.T, where, format="int8", dim=-1),
        "all_gather": quantized_all_gather(x.T, where, format="int8", dim=1),
        "all_to_all": quantized_all_to_all(x.T, where, format="int8", split_dim=1, concat_dim=0),
    }


def functions(group):
    """Results, what backward gives for gradients that differ by rank, and whether a graph of one node for each gives
    the same bits."""
    where, rank = place(group, (2, 2)), group.rank()
    x = numbers(rank, 8, 5).requires_grad_()
    results, gradients = used(x, where), {}
    for name, y in results.items():
        g = numbers(10 + rank, *y.shape)
        gradients[name] = g, *torch.autograd.grad(y, x, g)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    compiled = torch.compile(lambda x: used(x, where), fullgraph=True, backend=backend)(x)
    (again,) = torch.autograd.grad(list(compiled.values()), x, [gradients[name][0] for name in compiled])
    same = all(torch.equal(compiled[name], y) for name, y in results.items())
    same &= torch.allclose(again, sum(gradient for _, gradient in gradients.values()))
    nodes = sum(str(node.target).startswith("rewriter.quantized") for node in graphs[0].graph.nodes)
    return {n: y.detach() for n, y in results.items()}, gradients, same, nodes


def test_functions_their_gradients_and_graphs():
    grid, found = Oracle(2, 2, "int8", "int8"), launched()[0]
    xs = [numbers(rank, 8, 5).T for rank in range(4)]  # 5 × 8
    rows = [torch.cat([x, x.new_zeros(3, 8)]).view(4, 16) for x in xs]  # shards of 2, 2, 1 and 0 rows
    columns = [torch.stack(x.chunk(4, 1)).flatten(1) for x in xs]
    for rank, (results, gradients, same, nodes) in enumerate(found):
        have = (2, 2, 1, 0)[rank]
        expected = {
            "all_reduce": grid.all_reduce([x.contiguous() for x in xs]),
            "reduce_scatter": grid.reduced([r[rank] for r in rows], rank).view(2, 8)[:have],
            "reduce_scatter -1": grid.reduced([c[rank] for c in columns], rank).view(5, 2),
            "all_gather": torch.cat(list(grid.all_gather([x.contiguous() for x in xs])), 1),
            "all_to_all": grid.all_to_all(columns, rank).view(20, 2),
        }
        for name, y in expected.items():
            assert results[name].shape == y.shape, name
            assert results[name].is_contiguous(), name
            assert differing(results[name], y) <= 0.03, (name, rank)  # of 40 elements, one may lie on a tie

        def sent_back(name: str) -> list[Tensor]:
            return [gradients[name][0] for _, gradients, _, _ in found]

        shards = [torch.cat([g, g.new_zeros(2 - g.shape[0], 8)]).flatten() for g in sent_back("reduce_scatter")]
        parts = [g.view(4, 10) for g in sent_back("all_to_all")]
        backward = {
            "all_reduce": gradients["all_reduce"][0].double(),
            "reduce_scatter": grid.all_gather(shards).view(8, 8)[:5],
            "reduce_scatter -1": torch.cat(
                [g.view(5, 2) for g in grid.all_gather([g.flatten() for g in sent_back("reduce_scatter -1")])], 1
            ),
            "all_gather": gradients["all_gather"][0].chunk(4, 1)[rank].double(),
            "all_to_all": torch.cat([g.view(5, 2) for g in grid.all_to_all(parts, rank)], 1),
        }
        for name, g in backward.items():
            assert differing(gradients[name][1].T, g) <= 0.03, (name, rank)
        assert same
        assert nodes == len(results)


def test_one_rank_needs_no_process_group():
    x = numbers(0, 300).requires_grad_()
    for y in used(x.view(60, 5), None).values():
        assert torch.equal(y, x.view(60, 5).T)
        (gradient,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
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
        pending = quantized_all_reduce_start(first, mesh, format="int8", stages=2, name="first")
        exact = all_reduce_start(second.detach().clone(), group, "exact")
        other = quantized_all_reduce_start(second, group, format="int8", name="second")
        # this thread's messages, among those of the other one
        now = [
            quantized_all_reduce(x, where, format="int8", stages=2) for x in (first, second) for where in (mesh, group)
        ]
        # Nobody waits, and yet both hops of both pass: the first's thread, then the second's
        passed = [one.work.works[0].works[0].finished.wait(300) for one in (pending, other)]
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
        "groups": groups_made(first, mesh) == [1, 0, 0],
        "backward": backward_groups(first) == [True],
    }


def groups_made(x, mesh):
    """By each of three collectives."""
    counts = [process_groups._memberships()]
    for _ in range(3):
        all_reduce_wait(quantized_all_reduce_start(x, mesh["local"], format="int8"))
        counts.append(process_groups._memberships())
    return [after - before for before, after in pairwise(counts)]


def timeouts(group):
    """Whether the thread's groups, and those made for zero_plus_plus, wait as long as the group they stand for."""
    given = dist.new_group(list(range(4)), timeout=timedelta(seconds=47))
    made = topology.background(topology.topology_of(given)).intra.group
    dist.new_group([0])  # again: those of zero_plus_plus are made otherwise
    return [
        process_groups._timeout(g).seconds for g in (given, made, *node_groups(given, 2, "cpu").get_all_groups())
    ] == [47] * 4


def backward_groups(x):
    """Whether two groups of the same ranks are kept apart: which of them backward runs on."""
    first, second = (dist.new_group(list(range(4))) for _ in range(2))
    on_first, _ = (quantized_reduce_scatter(x, group, format="int8") for group in (first, second))
    used = []
    with pytest.MonkeyPatch.context() as patch:
        start = exchange._start
        patch.setattr(exchange, "_start", lambda *args: used.append(args[2] is first) or start(*args))
        on_first.sum().backward()
    return used


def test_started_early_it_needs_nobody_until_it_is_waited_for():
    for found in launched()[1]:
        starts = [("start", "first"), ("start", "exact"), ("start", "second")]
        waits = [("wait", "second"), ("wait", "exact"), ("wait", "first")]
        assert found["order"] == [*starts, ("mark", "computation"), *waits]
        assert found["passed"] == [True, True]
        assert all(found.values()), found

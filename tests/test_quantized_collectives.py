"""Quantized collectives on real ranks, against an oracle that quantizes and sums slice by slice in one process."""

from __future__ import annotations

import atexit
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree

from rewriter import RewriterError
from rewriter.kernels import dequantize, parse_format, quantize, slice_length
from rewriter.runtime import (
    all_reduce_start,
    all_reduce_wait,
    exchange,
    interruption,
    mark,
    process_groups,
    record_events,
)
from rewriter.runtime.exchange import Transfer
from rewriter.runtime.quantized import schedule_worker, schedules, topology
from rewriter.runtime.quantized.autograd import (
    quantized_all_gather,
    quantized_all_reduce,
    quantized_all_reduce_start,
    quantized_all_to_all,
    quantized_reduce_scatter,
)
from rewriter.runtime.quantized.launch import all_gather_start, all_to_all_start, reduce_scatter_start
from rewriter.runtime.quantized.launch import all_reduce_start as flat_all_reduce_start
from rewriter.runtime.quantized.topology import Topology
from rewriter.training.zero.nodes import node_groups

AXES = ("node", "local")


def place(group, shape):
    """A group of all ranks, or their mesh, or nobody else."""
    if shape == "alone":
        return None
    return group if shape is None else init_device_mesh("cpu", shape, mesh_dim_names=AXES[-len(shape) :])


def numbers(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What `rank` holds: heavy-tailed, and different on each."""
    generator = torch.Generator().manual_seed(100 + rank)
    x, scale = (torch.randn(*shape, generator=generator) for _ in range(2))
    return (x * (0.2 * scale).exp() + 0.01 * rank).to(dtype)


# --- the oracle ---


@dataclass(frozen=True)
class Oracle:
    """Y nodes × X ranks; formats inside a node and between nodes. All in fp64 but for what is quantized."""

    nodes: int
    local: int
    inside: str
    between: str

    @property
    def ranks(self) -> int:
        return self.nodes * self.local

    @property
    def last(self) -> str:
        return self.between if self.nodes > 1 else self.inside

    def reduced(self, slice_of: list[Tensor], owner: int) -> Tensor:
        """The sum for `owner` of what each rank holds of its slice."""
        if self.ranks == 1:
            return slice_of[0].double()
        node, place = divmod(owner, self.local)
        sums = []
        for y in range(self.nodes):
            parts = [slice_of[y * self.local + x] for x in range(self.local)]
            sums.append(sum(p.double() if x == place else sent(p, self.inside) for x, p in enumerate(parts)))
        between = [s if y == node else sent(s.float(), self.between) for y, s in enumerate(sums)]
        return torch.stack(between).sum(0)

    def all_reduce(self, xs: list[Tensor]) -> Tensor:
        if self.ranks == 1:
            return xs[0].double()
        n, block = xs[0].numel(), max(parse_format(f).block for f in (self.inside, self.between))
        size = -(-n // (self.ranks * block)) * block
        padded = [torch.cat([x.flatten(), x.new_zeros(self.ranks * size - n)]).view(self.ranks, size) for x in xs]
        total = [self.reduced([p[r] for p in padded], r).float() for r in range(self.ranks)]
        return torch.cat([sent(t, self.last) for t in total])[:n].view(xs[0].shape)

    def all_gather(self, xs: list[Tensor]) -> Tensor:
        return torch.stack([x.double() if self.ranks == 1 else sent(x, self.last) for x in xs])

    def all_to_all(self, xs: list[Tensor], rank: int) -> Tensor:
        """xs[r][p] goes from r to p."""
        formats = [self.inside if r // self.local == rank // self.local else self.between for r in range(self.ranks)]
        return torch.stack([x[rank].double() if r == rank else sent(x[rank], formats[r]) for r, x in enumerate(xs)])

    def exchanged(self, n: int) -> dict[str, int]:
        """{axis: bytes} of an all-to-all with parts of n elements."""
        inside, between = (parse_format(f).payload_bytes(n) for f in (self.inside, self.between))
        found = {
            "local": (self.local - 1) * (inside + (self.nodes - 1) * between),
            "node": (self.nodes - 1) * self.local * between,
        }
        return {axis: count for axis, count in found.items() if count}

    def bytes(self, n: int, stages: int, reduces: bool, gathers: bool) -> dict[str, int]:
        """{axis: bytes that a rank sends, and receives} for slices of n elements."""
        block = max(parse_format(f).block for f in (self.inside, self.between))
        chunk = max(-(-n // (stages * block)) * block, block)
        sizes = [min(chunk, n - start) for start in range(0, n, chunk)]
        inside, between = (sum(parse_format(f).payload_bytes(c) for c in sizes) for f in (self.inside, self.between))
        if self.nodes == 1:
            between = inside
        found = {
            "local": (self.local - 1) * self.nodes * (reduces * inside + gathers * between),
            "node": (self.nodes - 1) * (reduces + gathers) * between,
        }
        return {axis: count for axis, count in found.items() if count}


def sent(x: Tensor, format: str) -> Tensor:
    """What arrives of x."""
    return dequantize(quantize(x, format), format, x.shape, torch.float32).double()


def differing(found: Tensor, expected: Tensor) -> float:
    """Part of the elements that are not the expected ones, rounded to their dtype."""
    if not expected.numel():
        return 0.0
    limit = (torch.finfo(found.dtype).eps if found.dtype != torch.float32 else 1e-5) * expected.abs().max()
    return ((found.double() - expected).abs() > limit).double().mean().item()


# A sum that lies between two levels may be rounded to the other one where fp32 adds in another order.
TIES = 0.003


# --- values, places, bytes ---


@dataclass(frozen=True)
class Case:
    inside: str
    between: str
    n: int  # elements of a slice or shard, and of the tensor that is all-reduced
    stages: int = 1
    dtype: torch.dtype = torch.float32

    @property
    def formats(self) -> str:
        return self.inside if self.inside == self.between else f"{self.inside}/{self.between}"


ONE_HOP = (
    Case("int8", "int8", 1000),
    Case("int4-hadamard@32", "int4-hadamard@32", 517, 2, torch.bfloat16),
    Case("int6@16", "int6@16", 1, 3, torch.float16),
    Case("int8", "int8", 0),
)
TWO_HOPS = (
    Case("int8", "int4-hadamard@64", 1700, 3),
    Case("int8", "int8", 769, 2, torch.bfloat16),
    Case("int6@16", "int8@32", 130, 1, torch.float16),
    Case("int8", "int8", 0),
)
LAUNCHES = {  # ranks: (mesh, nodes, ranks of a node)
    2: ((None, 1, 2), ((1, 2), 1, 2), ((2, 1), 2, 1), ("alone", 1, 1)),
    3: ((None, 1, 3),),
    4: (((2, 2), 2, 2),),
    6: (((2, 3), 2, 3), ((3, 2), 3, 2)),
}


def cases_of(nodes: int, local: int) -> tuple[Case, ...]:
    return TWO_HOPS if nodes > 1 and local > 1 else ONE_HOP


def four(group, grids):
    """All four collectives: at once and started early, the bytes sent and received by axis."""
    return [on_grid(place(group, shape), group.rank(), nodes, local) for shape, nodes, local in grids]


def on_grid(where, rank, nodes, local):
    ranks, found = nodes * local, []
    rank %= ranks
    for case in cases_of(nodes, local):
        x, parts = numbers(rank, case.n, dtype=case.dtype), numbers(rank, ranks, case.n, dtype=case.dtype)
        started = {
            "all_reduce": partial(flat_all_reduce_start, x, where, case.formats, stages=case.stages),
            "reduce_scatter": partial(
                reduce_scatter_start, parts, where, case.formats, factor=0.5, dtype=torch.float32, stages=case.stages
            ),
            "all_gather": partial(all_gather_start, x, where, case.formats, dtype=torch.float32, stages=case.stages),
            "all_to_all": partial(all_to_all_start, parts, where, case.formats),
        }
        results: dict[str, tuple[Tensor, Tensor, Any, Any]] = {}
        for name, start in started.items():
            with record_events() as events:
                now, later = start(wait=True).wait(), start().wait()
            sent_bytes: Counter[str] = Counter()
            received: Counter[str] = Counter()
            for event in events:
                if event.kind == "wire":
                    sent_bytes[event.axis or "local"] += event.sent
                    received[event.axis or "local"] += event.received
            results[name] = now, later, dict(sent_bytes), dict(received)
        found.append((x, parts, results))
    return found


def everything(group):
    """What the tests of this module look at, of one launch."""
    ranks = group.size()
    dist.new_group([0])  # ranks belong to different numbers of groups, of which torch makes the names of new ones
    found = {"four": four(group, LAUNCHES[ranks])}
    for function in {2: (odd,), 4: (functions, chunked, early)}.get(ranks, ()):
        found[function.__name__] = function(group)
    return found


@cache
def launched(ranks: int) -> list[dict[str, Any]]:
    return run_ranks(everything, ranks)


def of(function, ranks: int) -> list[Any]:
    """What each rank of a launch found."""
    return [found[function.__name__] for found in launched(ranks)]


@pytest.mark.parametrize("ranks", LAUNCHES)
def test_values_places_and_bytes(ranks):
    """Each rank has its own slice, of the sum that the oracle computes; equal bits where results are replicated; the
    bytes on each axis are those of the formula."""
    for grid, (_, nodes, local) in enumerate(LAUNCHES[ranks]):
        compare([found[grid] for found in of(four, ranks)[: nodes * local]], nodes, local)


def compare(by_rank, nodes, local):
    for number, case in enumerate(cases_of(nodes, local)):
        oracle = Oracle(nodes, local, case.inside, case.between)
        xs, parts, results = zip(*(found[number] for found in by_rank), strict=True)
        for rank, result in enumerate(results):
            expected = {
                "all_reduce": oracle.all_reduce(list(xs)),
                "reduce_scatter": oracle.reduced([p[rank] for p in parts], rank) * 0.5,
                "all_gather": oracle.all_gather(list(xs)),
                "all_to_all": oracle.all_to_all(list(parts), rank),
            }
            size = slice_length(case.n, nodes * local, case.formats)
            predicted = {
                "all_reduce": oracle.bytes(size, case.stages, True, True),
                "reduce_scatter": oracle.bytes(case.n, case.stages, True, False),
                "all_gather": oracle.bytes(case.n, case.stages, False, True),
                "all_to_all": oracle.exchanged(case.n),
            }
            for name, (now, later, sent_bytes, received_bytes) in result.items():
                assert now.shape == expected[name].shape, (case, name)
                assert differing(now, expected[name]) <= TIES, (case, name, rank)
                assert torch.equal(now, later), (case, name, rank)
                twice = {axis: 2 * count for axis, count in predicted[name].items() if case.n}
                assert (sent_bytes, received_bytes) == (twice, twice), (case, name)
                if name in ("all_reduce", "all_gather"):
                    assert torch.equal(now, results[0][name][0]), (case, name, rank)


def chunked(group):
    """The axes of messages in their order; all-reduces to the nearest, and with 16 seeds in two chunks."""
    mesh, rank = place(group, (2, 2)), group.rank()
    with record_events() as events:
        reduce_scatter_start(numbers(rank, 4, 384), mesh, "int8", stages=3, wait=True)
        mark("gather")
        all_gather_start(numbers(rank, 384), mesh, "int8", dtype=torch.float32, stages=3, wait=True)
    dithered = [
        flat_all_reduce_start(numbers(rank, 1024), mesh, "int4", seed=seed, stages=2, wait=True).wait()
        for seed in (None, *range(16))
    ]
    return [event.axis or event.name for event in events], dithered


def test_chunks_overlap_and_seeds_agree():
    """The next chunk is on its way before the last one's second hop (Alg. 2 of arXiv 2306.10209; otherwise axes would
    take turns). Receivers take off the dither that senders have put on, so that errors are no larger than those of
    rounding to the nearest, but differ from seed to seed and cancel."""
    exact = sum(numbers(rank, 1024).double() for rank in range(4))
    for axes, (nearest, *dithered) in of(chunked, 4):
        assert axes[:6] == ["local", "local", "node", "local", "node", "node"]
        assert axes[7:] == ["node", "node", "local", "node", "local", "local"]
        errors = [relative(x, exact) / relative(nearest, exact) for x in dithered]
        assert 0.8 < min(errors) <= max(errors) < 1.2
        assert relative(torch.stack(dithered).mean(0), exact) / relative(nearest, exact) < 1.2 / 16**0.5


# --- many ranks in one process: the same programs, with messages that change hands between their steps ---


@dataclass
class Lockstep:
    """An axis whose messages lie in a box of all ranks until the next step."""

    ranks: int
    rank: int
    line: tuple[str, int]
    box: dict[Any, dict[int, Tensor]]
    step: int = field(default=0)

    def all_to_all_start(self, sent_PB: Tensor, name: str) -> Transfer:
        message = self._put(sent_PB)
        return Transfer([], lambda: torch.stack([message[p][self.rank] for p in range(self.ranks)]))

    def gather_start(self, rows_PB: Tensor, name: str) -> Transfer:
        message = self._put(rows_PB[self.rank].clone())
        return Transfer([], lambda: torch.stack([message[p] for p in range(self.ranks)], out=rows_PB))

    def _put(self, x: Tensor) -> dict[int, Tensor]:
        self.step += 1
        message = self.box.setdefault((self.line, self.step), {})
        message[self.rank] = x
        return message


def grid_place(nodes: int, local: int, rank: int, box: dict[Any, dict[int, Tensor]]) -> Topology:
    y, place = divmod(rank, local)
    return Topology(
        intra=Lockstep(local, place, ("local", y), box),  # type: ignore[arg-type]
        inter=Lockstep(nodes, y, ("node", place), box),  # type: ignore[arg-type]
        nodes=True,
    )


def scattered(xs: list[Tensor], nodes: int, local: int, formats: str, seed: int | None = None) -> Tensor:
    """[P, N]: what reduce_scatter leaves on each of nodes × local ranks that hold `xs` [P, N]."""
    box: dict[Any, dict[int, Tensor]] = {}
    out = torch.empty(nodes * local, xs[0].shape[1])
    programs = []
    for rank, x in enumerate(xs):
        where = grid_place(nodes, local, rank, box)
        chunk = schedules.Chunk(where, schedules.step_formats(formats, where, ""), seed=seed)
        programs.append(schedules.reduce_scatter(x, out[rank], 1.0, chunk))
    running = [(program, next(program)) for program in programs]
    while running:
        for _, transfer in running:
            transfer.wait()
        running = [(program, transfer) for program, _ in running if (transfer := next(program, None)) is not None]
    return out


def correlated(ranks: int, rho: float, draw) -> list[Tensor]:
    shared = draw()
    return [rho**0.5 * shared + (1 - rho) ** 0.5 * draw() for _ in range(ranks)]


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


def test_two_hops_over_64_ranks_err_as_measured():
    """Heavy tails, 8 × 8 ranks, 8 bits inside nodes and 4, rotated, between: at most .045 where ranks have a fifth of
    their variance in common. Sums of numbers that have nothing in common err as much as one 4-bit message does, .1."""
    torch.manual_seed(0)
    draw = torch.distributions.StudentT(4.0).sample
    for rho, least, most in ((0.2, 0.03, 0.045), (0.0, 0.08, 0.1)):
        xs = correlated(64, rho, lambda: draw((64, 128)))
        error = relative(scattered(xs, 8, 8, "int8/int4-hadamard"), torch.stack(xs).double().sum(0))
        assert least < error <= most, rho


def test_dithered_errors_of_ranks_cancel():
    """64 ranks, correlated (ρ = .9), 2 bits: the mean's error is at most .12; to the nearest level it does not shrink.
    Ranks of several nodes that hold the same numbers err each in its own way too."""
    torch.manual_seed(0)
    xs = correlated(64, 0.9, lambda: torch.randn(64, 128))
    expected = torch.stack(xs).double().sum(0)
    assert relative(scattered(xs, 1, 64, "int2-hadamard", seed=1), expected) <= 0.12
    assert relative(scattered(xs, 1, 64, "int2-hadamard"), expected) > 0.16
    x = torch.randn(16, 256)
    one = relative(dequantize(quantize(x, "int4", seed=1), "int4", x.shape, torch.float32, seed=1), x.double())
    # Of 4 × 4 ranks' parts 12 are quantized inside nodes, and the sums of 3 nodes, 4 times as large, between them.
    error = relative(scattered([x] * 16, 4, 4, "int4", seed=1), 16 * x.double())
    assert 0.85 < error / (one * (12 + 3 * 16) ** 0.5 / 16) < 1.15


def test_no_two_messages_share_a_seed():
    """Not those of two ranks, hops or chunks of a collective, nor those of neighbours that have other numbers of
    chunks."""
    used = []
    for seed in range(20):
        for rank in range(4):
            where = grid_place(2, 2, rank, {})
            for index in range(1 + seed % 4):
                chunk = schedules.Chunk(where, schedules.step_formats("int8", where, ""), seed=seed, index=index)
                inside, between = chunk.intra_seed + where.intra.rank, chunk.inter_seed + where.inter.rank
                gathered = chunk.gather_seed + where.intra.rank * 2 + where.inter.rank
                used += [inside, between, gathered]
    assert len({seed % 2**32 for seed in used}) == len(used) == 20 * 4 * 3 * 2.5


# --- functions of tensors: gradients, compiled graphs, shapes ---


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
    grid, found = Oracle(2, 2, "int8", "int8"), of(functions, 4)
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
        dealt = [g.view(4, 10) for g in sent_back("all_to_all")]
        backward = {
            "all_reduce": gradients["all_reduce"][0].double(),
            "reduce_scatter": grid.all_gather(shards).view(8, 8)[:5],
            "reduce_scatter -1": torch.cat(
                [g.view(5, 2) for g in grid.all_gather([g.flatten() for g in sent_back("reduce_scatter -1")])], 1
            ),
            "all_gather": gradients["all_gather"][0].chunk(4, 1)[rank].double(),
            "all_to_all": torch.cat([g.view(5, 2) for g in grid.all_to_all(dealt, rank)], 1),
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


# --- started early ---


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
        passed = [one.work.works[0].works[0].finished.wait(30) for one in (pending, other)]
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
    for found in of(early, 4):
        starts = [("start", "first"), ("start", "exact"), ("start", "second")]
        waits = [("wait", "second"), ("wait", "exact"), ("wait", "first")]
        assert found["order"] == [*starts, ("mark", "computation"), *waits]
        assert found["passed"] == [True, True]
        assert all(found.values()), found


def broken(group):
    """What is said, for each way to run programs, by the next call after one that failed between messages."""
    x, said = torch.ones(3000), {}
    ways = {
        "thread": lambda: quantized_all_reduce_start(x, group, format="int8", stages=2),
        "now": lambda: flat_all_reduce_start(x, group, "int8", wait=True),
        "one message": lambda: reduce_scatter_start(x, group, "int8"),
    }

    def fails(*_: Any) -> None:
        raise RuntimeError("the link is down")

    for way, start in ways.items():
        interruption._interrupted.clear()
        waited(start())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(schedules.Summands, "total", fails)
            patch.setattr(schedules.Summands, "requantized", fails)
            with pytest.raises(RuntimeError, match="the link is down"):
                waited(start())
        for after, later in ways.items():
            with pytest.raises(RewriterError) as error:
                waited(later())
            said[way, after] = str(error.value)
    return said


def waited(started):
    return started.wait() if isinstance(started, Transfer) else all_reduce_wait(started)


# --- what is not a number, and what cannot be done ---


def odd(group):
    rank, mesh = group.rank(), place(group, (2, 1))
    x = numbers(0, 700)
    x[300 + 200 * rank] = float("nan") if rank else float("inf")
    found = [quantized_all_reduce(x, where, format=f) for where in (group, mesh) for f in ("int8", "int4-hadamard")]
    compiled = torch.compile(lambda: quantized_all_reduce(x, group, format="int8"), fullgraph=True, backend="eager")()
    found.append(compiled)
    cube = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("a", "b", "c"))
    wrong = {
        "format": lambda: quantized_all_reduce(x, group, format="int5", name="mlp"),
        "hops": lambda: quantized_all_reduce(x, group, format="int8/int4"),
        "dtype": lambda: quantized_all_reduce_start(x.double(), group, format="int8"),
        "integers": lambda: quantized_all_gather(x.int(), group, format="int8"),
        "mesh": lambda: quantized_all_reduce(x, cube, format="int8"),
        "ranks": lambda: quantized_all_reduce(x, 2, format="int8"),
        "stages": lambda: quantized_all_reduce(x, group, format="int8", stages=0),
        "divide": lambda: reduce_scatter_start(x[:699], group, "int8"),
        "out": lambda: all_gather_start(x, group, "int8", dtype=x.dtype, out=x),
        "size": lambda: quantized_all_gather(x, group, format="int8", size=1000),
        "parts": lambda: quantized_all_to_all(x[:699], group, format="int8"),
        "no dimension": lambda: quantized_all_gather(x[0], group, format="int8", name="scale"),
        "one dimension": lambda: quantized_reduce_scatter(x, group, format="int8", dim=-2),
        "two dimensions": lambda: quantized_all_to_all(x[None], group, format="int8", concat_dim=2),
    }
    messages = {}
    for name, function in wrong.items():
        with pytest.raises(RewriterError) as error:
            function()
        messages[name] = str(error.value)
    return found, messages, ended_in_a_fork(), broken(group)


def ended_in_a_fork():
    """The exit status of a process forked from this one, whose thread has run, with a collective under way at its
    end: 0 if that ended first."""
    process = os.fork()
    if not process:
        signal.alarm(20)
        job = schedule_worker._QueuedSchedules([slow()])
        schedule_worker._queue().put(job)
        atexit._run_exitfuncs()
        os._exit(not job.finished.is_set())
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def slow():
    time.sleep(0.2)
    yield from ()


def test_what_is_not_finite_and_what_cannot_be_done():
    """Blocks of 128 that one rank could not quantize are NaN on all, the others are what they are."""
    expected = 2 * numbers(0, 700)
    expected[256:512] = float("nan")
    for found, messages, *_ in of(odd, 2):
        for total in found:
            assert torch.equal(total.isnan(), expected.isnan())
            assert relative(total.nan_to_num(), expected.nan_to_num().double()) < 0.15
        for name, words in {
            "format": "quantized_all_reduce mlp: format 'int5': expected one of int8, ",
            "hops": '"int8/int4" is a format inside nodes and one between them, but there is one group of 2 ranks',
            "dtype": "quantized_all_reduce: x is torch.float64, expected bfloat16, float16 or float32",
            "integers": "quantized_all_gather: x is torch.int32",
            "mesh": "a mesh of 3 dimensions (a 1, b 2, c 1)",
            "ranks": "expected a ProcessGroup or a DeviceMesh, not int",
            "stages": "stages=0, expected at least 1",
            "divide": "699 elements do not divide by 2 ranks",
            "out": "out is torch.float32 [700], expected contiguous torch.float32 of 2 × 700 elements",
            "size": "has 700, expected 500",
            "parts": "dimension 0 does not divide by 2 ranks",
            "no dimension": "quantized_all_gather scale: x [] has no dimension 0",
            "one dimension": "quantized_reduce_scatter: x [700] has no dimension -2",
            "two dimensions": "quantized_all_to_all: x [1, 700] has no dimension 2",
        }.items():
            assert words in messages[name], name


def test_an_error_between_messages_is_not_forgotten():
    """The waiting caller gets a thread's error too. Every later call would sum what has yet to arrive for this one."""
    for *_, said in of(odd, 2):
        assert len(said) == 9
        for words in said.values():
            assert "an earlier call in this process ended in RuntimeError(the link is down) with messages" in words


def test_collectives_end_before_their_process_does():
    """Otherwise it would abort. A fork has a thread of its own."""
    assert all(status == 0 for _, _, status, _ in of(odd, 2))

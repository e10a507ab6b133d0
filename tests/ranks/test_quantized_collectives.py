"""Quantized collectives on real ranks, against the oracle: values, places, bytes, hops and seeds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from quantized_oracle import TIES, Oracle, differing, numbers, place, relative
from ranks import run_ranks
from torch import Tensor

from rewriter.kernels import slice_length
from rewriter.runtime import mark, record_events
from rewriter.runtime.quantized.launch import all_gather, reduce_scatter
from rewriter.runtime.quantized.launch import all_reduce_start as flat_all_reduce_start


@dataclass(frozen=True)
class Case:
    inside: str
    between: str
    n: int  # elements of a slice or shard, and of the tensor that is all-reduced
    dtype: torch.dtype = torch.float32

    @property
    def formats(self) -> str:
        return self.inside if self.inside == self.between else f"{self.inside}/{self.between}"


ONE_HOP = (
    Case("int8", "int8", 1000),
    Case("int4-hadamard@32", "int4-hadamard@32", 517, torch.bfloat16),
    Case("int6@16", "int6@16", 1, torch.float16),
    Case("fp8@64", "fp8@64", 700, torch.bfloat16),
    Case("int8", "int8", 0),
)
TWO_HOPS = (
    Case("int8", "int4-hadamard@64", 1700),
    Case("int8", "int8", 769, torch.bfloat16),
    Case("int6@16", "int8@32", 130, torch.float16),
    Case("fp8", "int4", 900, torch.bfloat16),
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


def all_reduce(*args, **options):
    return flat_all_reduce_start(*args, **options).wait()


def three(group, grids):
    """All three collectives, the all-reduce started early too; the bytes sent and received by axis."""
    return [on_grid(place(group, shape), group.rank(), nodes, local) for shape, nodes, local in grids]


def on_grid(where, rank, nodes, local):
    ranks, found = nodes * local, []
    rank %= ranks
    for case in cases_of(nodes, local):
        x, parts = numbers(rank, case.n, dtype=case.dtype), numbers(rank, ranks, case.n, dtype=case.dtype)
        runs = {
            "all_reduce": partial(all_reduce, x, where, case.formats, wait=True),
            "started early": partial(all_reduce, x, where, case.formats),
            "reduce_scatter": partial(reduce_scatter, parts, where, case.formats, factor=0.5, dtype=torch.float32),
            "all_gather": partial(all_gather, x, where, case.formats, dtype=torch.float32),
        }
        results: dict[str, tuple[Tensor, Any, Any]] = {}
        for name, run in runs.items():
            with record_events() as events:
                result = run()
            sent_bytes: Counter[str] = Counter()
            received: Counter[str] = Counter()
            for event in events:
                if event.kind == "wire":
                    sent_bytes[event.axis or "local"] += event.sent
                    received[event.axis or "local"] += event.received
            results[name] = result, dict(sent_bytes), dict(received)
        found.append((x, parts, results))
    return found


def everything(group):
    """What the tests of this module look at, of one launch."""
    dist.new_group([0])  # ranks belong to different numbers of groups, of which torch makes the names of new ones
    return three(group, LAUNCHES[group.size()]), seeded(group) if group.size() == 4 else None


@cache
def launched(ranks: int) -> list[Any]:
    return run_ranks(everything, ranks)


@pytest.mark.parametrize("ranks", LAUNCHES)
@pytest.mark.fast("2", "3")
def test_values_places_and_bytes(ranks):
    """Each rank has its own slice, of the sum that the oracle computes; equal bits where results are replicated; the
    bytes on each axis are those of the formula."""
    for grid, (_, nodes, local) in enumerate(LAUNCHES[ranks]):
        compare([found[grid] for found, _ in launched(ranks)[: nodes * local]], nodes, local)


def compare(by_rank, nodes, local):
    for number, case in enumerate(cases_of(nodes, local)):
        oracle = Oracle(nodes, local, case.inside, case.between)
        xs, parts, results = zip(*(found[number] for found in by_rank), strict=True)
        for rank, result in enumerate(results):
            expected = {
                "all_reduce": oracle.all_reduce(list(xs)),
                "reduce_scatter": oracle.reduced([p[rank] for p in parts], rank) * 0.5,
                "all_gather": oracle.all_gather(list(xs)),
            }
            size = slice_length(case.n, nodes * local, case.formats)
            predicted = {
                "all_reduce": oracle.bytes(size, True, True),
                "reduce_scatter": oracle.bytes(case.n, True, False),
                "all_gather": oracle.bytes(case.n, False, True),
            }
            assert torch.equal(result.pop("started early")[0], result["all_reduce"][0]), (case, rank)
            for name, (value, sent_bytes, received_bytes) in result.items():
                assert value.shape == expected[name].shape, (case, name)
                assert differing(value, expected[name]) <= TIES, (case, name, rank)
                wanted = predicted[name] if case.n else {}
                assert (sent_bytes, received_bytes) == (wanted, wanted), (case, name)
                if name in ("all_reduce", "all_gather"):
                    assert torch.equal(value, results[0][name][0]), (case, name, rank)


def seeded(group):
    """The axes of messages in their order; all-reduces to the nearest, and with 16 seeds."""
    mesh, rank = place(group, (2, 2)), group.rank()
    with record_events() as events:
        reduce_scatter(numbers(rank, 4, 384), mesh, "int8")
        mark("gather")
        all_gather(numbers(rank, 384), mesh, "int8", dtype=torch.float32)
    dithered = [
        flat_all_reduce_start(numbers(rank, 1024), mesh, "int4", seed=seed, wait=True).wait()
        for seed in (None, *range(16))
    ]
    return [event.axis or event.name for event in events], dithered


def test_hops_are_in_order_and_seeds_agree():
    """Sums are made inside nodes first, gathers between them first (arXiv 2306.10209, section 3.3).
    Receivers take off the dither that senders have put on, so that errors are no larger than those of rounding to the
    nearest, but differ from seed to seed and cancel."""
    exact = sum(numbers(rank, 1024).double() for rank in range(4))
    for _, (axes, (nearest, *dithered)) in launched(4):
        assert axes == ["local", "node", "gather", "node", "local"]
        errors = [relative(x, exact) / relative(nearest, exact) for x in dithered]
        assert 0.8 < min(errors) <= max(errors) < 1.2
        assert relative(torch.stack(dithered).mean(0), exact) / relative(nearest, exact) < 1.2 / 16**0.5

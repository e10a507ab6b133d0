"""Which plan is chosen for sequence-sharded attention: never worse than brute force, and as closed forms say."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
from plan_cases import WIDE, drawn, uniform

from rewriter.common.errors import RewriterError
from rewriter.fabric import load_fabric
from rewriter.ir.ops import SequencePlan
from rewriter.passes.sequence.distributed_attention import AttentionShape, wire_bytes
from rewriter.passes.sequence.sequence_costs import memory
from rewriter.passes.sequence.sequence_plans import Setting, choose, cost, plans

# --- what is chosen --------------------------------------------------------------------------------------------------

THIN = uniform(1e3)  # links so thin that bytes decide


def every_plan(shape: AttentionShape, ranks: int) -> list[SequencePlan]:
    """All plans by brute force: a head count works if it divides the query heads and every rank gets whole heads of
    keys and values."""
    found = [SequencePlan("ring", (1, ranks, 1), overlap=True)] if ranks > 1 else []
    for heads, rows, columns in itertools.product(range(1, ranks + 1), repeat=3):
        per_rank = math.lcm(shape.kv_heads, heads) == max(shape.kv_heads, heads)
        if heads * rows * columns == ranks and shape.q_heads % heads == 0 and per_rank:
            if rows * columns > 1:
                found += [SequencePlan("attention2d", (heads, rows, columns), overlap) for overlap in (False, True)]
            else:
                found.append(SequencePlan("ulysses" if ranks > 1 else "attention2d", (heads, 1, 1)))
    return found


@pytest.mark.parametrize("seed", range(24))
def test_the_chosen_plan_is_never_worse_than_brute_force(seed: int) -> None:
    shape, ranks, tokens = drawn(seed)
    for fabric in (load_fabric("h100-nvlink"), THIN, uniform(1e12)):
        setting = Setting(tokens, fabric)
        ranking = plans(shape, ranks, setting)
        assert {c.plan for c in ranking.costs} == set(every_plan(shape, ranks))
        every = [cost(plan, shape, setting) for plan in every_plan(shape, ranks)]
        fastest = min(c.times.total for c in every)
        alike = [c for c in every if c.times.total <= 1.05 * fastest]
        assert ranking.best.times.total <= 1.05 * fastest
        assert ranking.best.wire.total == min(c.wire.total for c in alike)
        assert choose(shape, ranks, setting=setting) == ranking.best.plan


@pytest.mark.parametrize("ranks", [4, 6, 12, 16, 36])
def test_on_thin_links_the_fewest_bytes_win(ranks: int) -> None:
    for q_heads, kv_heads in [(16, 16), (16, 4), (9, 3), (1, 1), (12, 1)]:
        shape = AttentionShape(q_heads, kv_heads, 64, 64)
        best = plans(shape, ranks, Setting(8192, THIN)).best
        least = min(max(wire_bytes(p, shape, 8192, r).total for r in range(ranks)) for p in every_plan(shape, ranks))
        assert best.wire.total <= 1.05 * least


def best_grid(shape: AttentionShape, ranks: int, heads: tuple[int, ...] = (1,), **setting: Any) -> tuple[int, ...]:
    """The grid of the fewest forward bytes among h × r × c."""
    costs = plans(shape, ranks, Setting(ranks * 64, THIN, **setting)).costs
    return min((c for c in costs if c.plan.grid[0] in heads), key=lambda c: c.wire.forward).plan.grid


def test_grids_are_rectangular_where_keys_travel_in_fewer_bits() -> None:
    """Section 3.2 of the paper. One head on 36 ranks: 6 × 6, and with half the bits for k and v 9 × 4."""
    shape = AttentionShape(1, 1, WIDE, WIDE)
    assert best_grid(shape, 36) == (1, 6, 6)
    assert best_grid(shape, 36, quantized="int8") == (1, 9, 4)


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "ranks", "grid"),
    [(32, 8, 64, (16, 4)), (9, 1, 36, (18, 2)), (16, 8, 32, (8, 4)), (8, 8, 64, (8, 8))],
)
def test_grids_have_rows_to_columns_as_query_heads_to_key_heads(
    q_heads: int, kv_heads: int, ranks: int, grid: tuple[int, int]
) -> None:
    assert grid[0] * kv_heads == grid[1] * q_heads
    assert best_grid(AttentionShape(q_heads, kv_heads, WIDE, WIDE), ranks) == (1, *grid)


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 7, 8, 16])
def test_a_gather_of_keys_wins_until_twice_the_group_and_two(groups: int) -> None:
    """Queries travel, c = 2, only if P > 2 G + 2."""
    shape = AttentionShape(groups, 1, WIDE, WIDE)
    for ranks in range(4, 4 * groups + 8, 2):

        def sent(rows: int, columns: int, ranks: int = ranks) -> int:
            plan = SequencePlan("attention2d", (1, rows, columns))
            return max(wire_bytes(plan, shape, ranks, rank).forward for rank in range(ranks))

        assert (sent(ranks // 2, 2) < sent(ranks, 1)) == (ranks > 2 * groups + 2)


def test_heads_are_exchanged_first_where_they_divide() -> None:
    setting, every = Setting(8192, THIN), tuple(range(1, 257))
    heads, grouped = AttentionShape(32, 32, 128, 128), AttentionShape(32, 8, 128, 128)
    assert choose(heads, 16, setting=setting) == SequencePlan("ulysses", (16, 1, 1))
    assert best_grid(grouped, 64, every) == (8, 8, 1)
    assert best_grid(grouped, 256, every) == (8, 16, 2)  # 8 × 8 × 4 but for twice the log-sum-exps
    # heads stay exchanged between forward and backward, but keys are gathered twice
    assert choose(grouped, 64, setting=setting).grid == (32, 2, 1)
    assert best_grid(AttentionShape(9, 3, 128, 128), 64, every) == (1, 16, 4)


def test_plans_that_hold_too_much_come_last() -> None:
    shape, setting = AttentionShape(9, 3, 64, 64), Setting(65536, uniform(1e15))
    free = plans(shape, 8, setting)
    limit = min(c.memory for c in free.costs)
    bound = plans(shape, 8, dataclasses.replace(setting, memory_limit=limit))
    assert bound.best.memory == limit < free.best.memory
    assert [c.fits for c in bound.costs] == sorted((c.fits for c in bound.costs), reverse=True)
    none = plans(shape, 8, dataclasses.replace(setting, memory_limit=1))
    assert none.best.memory == limit
    assert not none.best.fits


def test_layers_of_several_shapes_share_a_plan() -> None:
    """4 heads divide the first kind of layer alone; costs add up."""
    first, second = AttentionShape(8, 4, 16, 16, layers=3), AttentionShape(6, 2, 16, 16, layers=2)
    ranking = plans((first, second), 4, Setting(1024))
    assert ranking.refused == {"heads=4 does not divide 6 query heads": ((4, 1, 1),)}
    plan = SequencePlan("attention2d", (2, 1, 2))
    together = cost(plan, (first, second), Setting(1024))
    one, two = (wire_bytes(plan, shape, 1024, 0) for shape in (first, second))
    assert together.wire.forward == 3 * one.forward + 2 * two.forward
    assert together.saved == 3 * memory(plan, first, 1024).saved + 2 * memory(plan, second, 1024).saved


def test_fixed_options_are_kept_and_the_others_chosen() -> None:
    shape = AttentionShape(16, 4, 64, 64)
    assert choose(shape, 4, kind="ring") == SequencePlan("ring", (1, 4, 1), overlap=True)
    assert choose(shape, 4, kind="ulysses") == SequencePlan("ulysses", (4, 1, 1))
    assert choose(shape, 4, grid=[1, 2, 2], overlap=False) == SequencePlan("attention2d", (1, 2, 2))
    assert choose(shape, 4, grid=[1, 2, 2], overlap=True) == SequencePlan("attention2d", (1, 2, 2), True)
    assert choose(shape, 4, grid=(4, 1, 1)) == SequencePlan("ulysses", (4, 1, 1))
    assert choose(shape, 4, kind="attention2d", grid=(4, 1, 1)) == SequencePlan("attention2d", (4, 1, 1))
    assert choose(shape, 4, kind="attention2d").kind == "attention2d"
    assert choose(shape, 1) == SequencePlan("attention2d", (1, 1, 1))
    assert choose(shape, 4, kind="ring", overlap=True).kind == "ring"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 0}, r"--sp 0: expected 1 or more"),
        ({"grid": [1, 2, 3]}, r"grid \[1, 2, 3\] is of 6 ranks, but --sp is 4. Nearest grids that can: \[1, 2, 2\]"),
        ({"grid": [2, 2]}, r"grid \[2, 2\]: expected \[heads, rows, columns\]"),
        ({"grid": [4, 1, 1]}, r"ulysses 4×1×1: heads=4 does not divide 9 query heads. Nearest .* \[1, 4, 1\]"),
        ({"kind": "ulysses"}, r"heads=4 does not divide 9 query heads"),
        ({"kind": "ring", "grid": [1, 2, 2]}, r"grid \[1, 2, 2\] is no ring. On 4 ranks its grid is \[1, 4, 1\]"),
        ({"kind": "ring", "overlap": False}, r"a ring always overlaps"),
        ({"kind": "ulysses", "overlap": True}, r"nothing to overlap"),
    ],
)
def test_what_cannot_be_chosen_is_refused_with_the_reason(options: dict[str, object], message: str) -> None:
    with pytest.raises(RewriterError, match=message):
        choose(AttentionShape(9, 3, 8, 8), **{"ranks": 4, **options})

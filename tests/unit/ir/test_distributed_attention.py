"""Kinds of distributed attention have all facets, layouts are what they are called, masks answer as they show."""

from __future__ import annotations

import ast
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
import torch

import rewriter
from rewriter.ir.attention_mask import visible_pairs
from rewriter.ir.ops import MaskSpec, SequenceKind, SequencePlan
from rewriter.ir.sequence_plan import KINDS, indices, join_tokens, padded, take_tokens
from rewriter.passes.sequence import distributed_attention
from rewriter.runtime.attention import sequence_axis
from rewriter.runtime.attention.attention_call import RankAttention

PACKAGE = Path(rewriter.__file__).parent


def test_every_kind_has_both_halves():
    kinds = set(get_args(SequenceKind))
    assert set(KINDS) == set(distributed_attention.ALGORITHMS) == set(sequence_axis.ALGORITHMS) == kinds


@pytest.mark.parametrize("kind", get_args(SequenceKind))
def test_a_kind_plans_and_runs(kind):
    plans = list(distributed_attention.ALGORITHMS[kind].plans(4))
    assert plans
    assert all(plan.kind == kind and plan.ranks == 4 for plan in plans)
    for half in sequence_axis.ALGORITHMS[kind]:
        assert isinstance(half, RankAttention)


def test_no_other_place_asks_for_the_kind():
    """Names of kinds are compared nowhere: what differs is registered. (`fabric` speaks of NCCL's rings.)"""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent.name == "fabric":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                constants = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
                found += [f"{path}:{node.lineno}" for name in constants if name in get_args(SequenceKind)]
    assert not found


# --- layouts, against their plain definitions ---


def held(layout: str, rank: int, ranks: int, length: int) -> list[int]:
    """Tokens p, p + P, p + 2P, … or, zigzag, chunk p of 2P and its mirror image."""
    if layout == "cyclic":
        return [t for t in range(max(1, -(-length // ranks)) * ranks) if t % ranks == rank]
    total = max(1, -(-length // (2 * ranks))) * 2 * ranks
    chunk = total // (2 * ranks)
    return [t for t in range(total) if t // chunk in (rank, 2 * ranks - 1 - rank)]


@pytest.mark.parametrize(
    ("layout", "ranks", "length"), list(product(("cyclic", "zigzag"), (1, 2, 3, 4), (1, 7, 8, 25)))
)
def test_ranks_hold_the_tokens_of_the_layout(layout, ranks, length):
    parts = [take_tokens(torch.arange(1, length + 1), 0, layout, rank, ranks) for rank in range(ranks)]
    for rank, part in enumerate(parts):
        own = held(layout, rank, ranks, length)
        assert indices(layout, rank, ranks, length).tolist() == own
        assert part.tolist() == [t + 1 if t < length else 0 for t in own]
    assert torch.equal(join_tokens(parts, 0, layout, length), torch.arange(1, length + 1))


@pytest.mark.parametrize("plan", [SequencePlan("ring", (1, 4, 1)), SequencePlan("ulysses", (4, 1, 1))], ids=str)
def test_a_plan_counts_its_local_tokens(plan):
    for length in (1, 8, 9):
        assert plan.local_tokens(length) == len(held(plan.layout, 0, 4, length)) == padded(length, plan.multiple) // 4


# --- what a mask answers, against what it shows ---

MASKS = [MaskSpec("causal"), MaskSpec("bidirectional")]
MASKS += [MaskSpec(kind, size) for kind in ("window", "chunk") for size in (1, 3, 5, 12, 40)]
LENGTH = 12


def shown(mask: MaskSpec, shift: int = 0) -> torch.Tensor:
    positions = torch.arange(LENGTH) + shift
    return mask.visible(positions, positions).expand(LENGTH, LENGTH)


@pytest.mark.parametrize("mask", MASKS, ids=lambda m: m.label)
def test_a_mask_answers_what_it_shows(mask):
    seen, distance = shown(mask), torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    assert mask.causal == (not seen[distance < 0].any())
    assert mask.reach is None or not seen[distance >= mask.reach].any()
    if mask.unbounded(LENGTH):
        assert torch.equal(seen, shown(MaskSpec("causal" if mask.causal else "bidirectional")))
    assert mask.cached is None or not (seen & (distance >= mask.cached)).any()
    if not mask.shifts:
        assert all(torch.equal(seen, shown(mask, shift)) for shift in range(1, 6))
    for shift in (0, 1, 7):
        for s in range(LENGTH):
            first = int(shown(mask, shift)[s].float().argmax()) + shift
            assert max(mask.first_key(s + shift), shift) == first
            assert mask.first_key(s + shift, origin=False) <= mask.first_key(s + shift)
    assert visible_pairs(LENGTH, mask.causal, mask.reach) >= seen.sum()
    if not mask.shifts:
        assert visible_pairs(LENGTH, mask.causal, mask.reach) == seen.sum()
    assert eval(mask.source) == mask


@pytest.mark.parametrize(("a", "b"), list(product(MASKS, MASKS)), ids=lambda m: m.label)
def test_an_intersection_shows_what_both_show(a, b):
    both = a.intersection(b)
    if both is None:
        assert "chunk" in (a.kind, b.kind)
        assert a.kind != "causal" != b.kind
    else:
        assert torch.equal(shown(both), shown(a) & shown(b))

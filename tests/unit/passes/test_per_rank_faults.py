"""Comparing with the reference notices every seeded fault: of per-rank residuals, and of a parallel layer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import faults
import pytest
import torch
import zoo
from oracles import relative_error
from per_rank_wiring import LADDER, OWN, PARALLEL, desync
from programs import tensor_parallel, traced, weights

from rewriter.check.per_rank_reference import LayerMode, PerRankReference
from rewriter.common.errors import RewriterError
from rewriter.ir import Program
from rewriter.ir.simulate import simulate

FAMILY = "llama_mha_bias"
RANKS = 2


# name → (passes, what they mean)
REWRITES: Mapping[str, tuple[list[tuple[str, dict[str, Any]]], list[LayerMode]]] = {
    "2x": ([("desync", {"n": 2})], [desync(False, True)] * 4),
    "2x-untied": ([("desync", {"n": 2, "untie_norms": True})], [desync(False, True)] * 4),
    "4x-sum": (
        [("desync", {"n": 4, "resync": "sum"})],
        [desync(False, False, resync="sum"), desync(False, True, resync="sum")] * 2,
    ),
    "drop-sync": (
        [("drop_sync", {"layers": [1, 2]})],
        [LayerMode(), desync(False, True, resync="sum"), desync(False, True, resync="sum"), LayerMode()],
    ),
    "own-partial": ([("ladder", {"variant": "own_partial"})], [OWN] * 4),
    "own-partial-then-ladder": (
        [("ladder", {"layers": [0, 1], "variant": "own_partial"}), ("ladder", {"layers": [2, 3]})],
        [OWN, OWN, LADDER, LADDER],
    ),
    "desync-then-ladder": (
        [("desync", {"layers": [0, 1], "n": 4}), ("ladder", {"layers": [2, 3]})],
        [desync(False, False), desync(False, True), LADDER, LADDER],
    ),
    "own-partial-then-standard": (
        [("ladder", {"layers": [0, 1], "variant": "own_partial"})],
        [OWN, OWN, LayerMode(), LayerMode()],
    ),
    "parallel-then-ladder": (
        [("parallel_block", {"layers": [0, 1], "norm": "own"}), ("ladder", {"layers": [2, 3]})],
        [PARALLEL, PARALLEL, LADDER, LADDER],
    ),
}


@functools.cache
def program(name: str) -> Program:
    return tensor_parallel(traced(FAMILY), RANKS, *REWRITES[name][0])


@functools.cache
def untied(name: str) -> dict[str, torch.Tensor]:
    """Weights per rank, [2 · 64], that differ by rank."""
    names = [n for n, p in program(name).parameters.items() if p.ranges and n.endswith("layernorm.weight")]
    return {n: weights(FAMILY)[n].repeat(RANKS) * torch.linspace(0.5, 1.5, 128) for n in names}


@torch.no_grad()
def logits(some_program: Program, name: str) -> torch.Tensor:
    return simulate(some_program, zoo.batch(2, 21), weights=weights(FAMILY) | untied(name))


@functools.cache
@torch.no_grad()
def expected(name: str) -> torch.Tensor:
    mix = dict(enumerate(REWRITES[name][1]))
    return PerRankReference(zoo.shared(FAMILY), mix, RANKS, untied=untied(name))(zoo.batch(2, 21))


@pytest.mark.parametrize("name", REWRITES)
def test_without_a_fault_the_program_equals_the_reference(name: str) -> None:
    assert relative_error(logits(program(name), name), expected(name)) <= 1e-5


Fault = Callable[[Program], Program]
Faults = Mapping[str, tuple[str, Fault]]

OTHER_LOGITS: Faults = {
    "mean for sum": ("4x-sum", faults.mean_for_sum),
    "mean where Sync-Point Drop sums": ("drop-sync", faults.mean_for_sum),
    "attention is not brought along": ("drop-sync", lambda p: faults.partial_forgotten(p, 3, operand=1)),
    "1 / P is forgotten": ("2x", faults.shares_forgotten),
    "a partial is forgotten": ("4x-sum", lambda p: faults.partial_forgotten(p, 1)),
    "the kept block's partial is forgotten": ("4x-sum", lambda p: faults.partial_forgotten(p, 3)),
    "the own partial is omitted": ("own-partial", lambda p: faults.own_partial_omitted(p, 3)),
    "the own partial is another block's": ("own-partial", lambda p: faults.own_partial_of_another_block(p, 3)),
    "stale after own partial": ("own-partial-then-standard", lambda p: faults.read_elsewhere(p, 2, back=1)),
    "the other ladder is not drained": ("own-partial-then-ladder", lambda p: faults.read_elsewhere(p, 2, back=1)),
    "drained after parallel": ("parallel-then-ladder", lambda p: faults.read_elsewhere(p, 2, back=0)),
    "a parallel MLP reads attention": ("parallel-then-ladder", lambda p: faults.parallel_mlp_reads_attention(p, 1)),
    "a bias per rank": ("2x", lambda p: faults.biases_on_rank(p, every=True)),
    "a bias on one rank": ("2x", lambda p: faults.biases_on_rank(p, every=False)),
    "a bias on one rank of a ladder": ("own-partial", lambda p: faults.biases_on_rank(p, every=False)),
    "another rank's norms": ("2x-untied", faults.norms_of_another_rank),
}
# The simulated ranks no longer hold the same value where they have to.
RANKS_APART: Faults = {
    "a kept reduction is dropped": ("2x", faults.kept_reduction_dropped),
    "the last kept reduction is dropped": ("2x", lambda p: faults.kept_reduction_dropped(p, 3)),
    "a reduction is missing": ("own-partial", lambda p: faults.reduction_missing(p, 2)),
    "the own partial is stored": ("own-partial", lambda p: faults.own_partial_stored(p, 3)),
    "the last own partial is stored": ("own-partial", lambda p: faults.own_partial_stored(p, 7)),
    "stale after desync": ("desync-then-ladder", lambda p: faults.read_elsewhere(p, 2, back=1)),
}


@pytest.mark.parametrize(("name", "fault"), OTHER_LOGITS.values(), ids=OTHER_LOGITS)
def test_a_fault_gives_other_logits(name: str, fault: Fault) -> None:
    assert relative_error(logits(fault(program(name)), name), expected(name)) >= 1e-2


@pytest.mark.parametrize(("name", "fault"), RANKS_APART.values(), ids=RANKS_APART)
def test_a_fault_that_drives_ranks_apart_is_refused(name: str, fault: Fault) -> None:
    with pytest.raises(RewriterError, match="a reduction is missing"):
        logits(fault(program(name)), name)

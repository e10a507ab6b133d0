"""Weights that stay in the node: four ranks as two nodes of two, against FSDP2 over all of them.

What masters hold is compared parameter by parameter, what nodes hold bit by bit. Faults are seeded.
"""

from __future__ import annotations

import functools

import pytest
import torch
from ranks import run_ranks
from zero_model import LOCAL, RANKS, marked
from zero_node_local_ranks import CASES, SLOW, node_local_cases


@functools.cache
def results_of(slow):
    return run_ranks(node_local_cases, RANKS, slow)


def check_gradients(case):
    ranks = [rank["gradients"][case] for rank in results_of(case in SLOW)]
    local = {"nodes of one": 1, "one node": RANKS}.get(case, LOCAL)
    for name, gradient in ranks[0][1].items():
        places = [[rank[0][name] for rank in ranks[place::local]] for place in range(local)]
        found, count = (torch.cat([sum(pair[i] for pair in place) for place in places]) for i in (0, 1))
        assert torch.equal(count, torch.ones_like(count)), f"{name}: not each element is stepped by one rank"
        error = float((found - gradient).norm() / gradient.norm())
        assert error <= (0.05 if case == "bf16" else 0.02), f"{name} of {len(gradient)}: error {error:.1e}"
    for _, _, wanted, norm in ranks:
        assert abs(float(norm) - wanted) <= 0.01 * wanted


@pytest.mark.parametrize("case", marked(CASES[:-1], SLOW))
@pytest.mark.slow
def test_gradients_of_masters_are_those_of_fsdp2_and_so_is_their_norm(case):
    check_gradients(case)


def test_gradients_that_are_summed_over_nodes_are_found():
    with pytest.raises(AssertionError):
        check_gradients("summed over nodes")


def check_replicas(which):
    ranks = [rank[which] for rank in results_of(which in SLOW)]
    for rank, (weights, _, _) in enumerate(ranks):
        for name, weight in weights.items():
            assert torch.equal(weight, ranks[rank % LOCAL][0][name]), f"{name} of rank {rank} differs between nodes"
    for _, lag, same in ranks:
        assert same, "resumed training differs"
        assert lag < (1e-2 if "bf16" in which else 1e-3), lag


@pytest.mark.parametrize("which", marked(["trained", "trained bf16"], SLOW))
def test_nodes_hold_equal_bits_follow_their_masters_and_resume(which):
    check_replicas(which)


def test_an_owner_that_adds_what_it_holds_is_found():
    with pytest.raises(AssertionError, match="differs between nodes"):
        check_replicas("owner adds what it holds")


def test_loaded_weights_renew_the_masters():
    assert [rank["loaded"] for rank in results_of(False)] == [[]] * RANKS


@pytest.mark.parametrize("scaler", ["GradScaler", "ShardedGradScaler"])
def test_an_overflow_of_one_rank_skips_the_step_of_all(scaler):
    for rank in results_of(False):
        ((skipped, halved), (moved, kept)), expected = rank["scaled"][scaler]
        assert float(skipped.norm()) == 0
        assert halved == kept == 4.0
        assert float((moved - expected).norm()) <= 0.02 * float(expected.norm())


def test_parameters_keep_the_options_of_their_groups():
    for rank in results_of(False):
        for name, (before, after, decay) in rank["options"].items():
            assert float((after - before * decay).norm()) <= 1e-3 * float(before.norm()), name

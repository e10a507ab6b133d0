"""The comm hooks of ZeRO++ on FSDP2, alone and together: four ranks as two nodes of two, against FSDP2 without them.

Gradients are compared parameter by parameter, so that a wrong scale of one shape fails; weights that ranks compute
with, bit by bit. Faults that must not stay silent are seeded.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from ranks import run_ranks
from zero_comm_hook_ranks import (
    CASES,
    FAULTS,
    HOOKS,
    SLOW,
    STEPPED,
    comm_hook_cases,
    own_shard_exact,
    secondary_quantized,
)
from zero_model import RANKS, marked


@functools.cache
def results_of(slow):
    return run_ranks(comm_hook_cases, RANKS, slow)


# relative L2 error of a parameter's gradient by what is quantized
EXACT = 1e-5


def limit(case):
    hooks, policy = CASES[case][:2]
    formats = HOOKS[hooks].get("gradients")
    if formats is None:
        return 2e-2 if policy else EXACT
    return 0.15 if "int4" in formats else 0.02


def check_gradients(case, results, key=None):
    """Shards of all ranks together, parameter by parameter."""
    ranks = [rank[key or case] for rank in results]
    assert ranks[0][0].keys() == ranks[0][1].keys()
    for name in ranks[0][1]:
        found, gradient = (torch.cat([rank[which][name].flatten() for rank in ranks]) for which in (0, 1))
        size = float(gradient.norm())
        assert size > 0, name
        error = float((found - gradient).norm()) / size
        assert error <= limit(case), f"{name} of {len(gradient)}: error {error:.1e}"
        scale = float((found * gradient).sum() / gradient.square().sum())
        assert abs(scale - 1) <= limit(case), f"{name} of {len(gradient)}: scale {scale:.3f}"


def check_weights(case, results, key=None):
    """All ranks compute with equal bits, in forward and in backward, and none has changed what the optimizer steps."""
    first = results[0][key or case][2]["forward"][0]
    for _, _, seen, kept in (rank[key or case] for rank in results):
        assert len(seen["forward"]) == len(seen["backward"]) > 0
        for weight in itertools.chain(*seen.values()):
            assert torch.equal(weight, first)
        assert kept


@pytest.mark.parametrize("case", marked(CASES, SLOW))
def test_gradients_are_those_of_fsdp2_with_the_same_weights(case):
    check_gradients(case, results_of(case in SLOW))


@pytest.mark.parametrize("case", marked(CASES, SLOW))
def test_ranks_compute_with_equal_weights_in_forward_and_backward(case):
    check_weights(case, results_of(case in SLOW))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_by_the_same_comparisons(fault):
    check = check_weights if fault in (own_shard_exact, secondary_quantized) else check_gradients
    with pytest.raises(AssertionError):
        check(FAULTS[fault], results_of(False), fault.__name__)


def test_replicas_round_differently_so_that_their_errors_average_out():
    ranks = [rank["replicas"] for rank in results_of(False)]
    for first, second in ((0, 2), (1, 3)):
        exact, error = (ranks[first][0] - ranks[second][0]).abs() > 0, []
        assert exact.float().mean() > 0.5
        for rank in (first, second):
            _, found, expected = ranks[rank]
            error.append(float((found - expected).norm() / expected.norm()))
        assert max(error) < 0.02, error


@pytest.mark.parametrize("hooks", STEPPED)
def test_a_step_after_a_forward_pass_without_gradients_is_seen(hooks):
    for rank in results_of(False):
        (before, found), (_, expected) = rank["stepped"][hooks]
        error, moved = ((found - other).norm() / expected.norm() for other in (expected, before))
        assert error < (0.02 if "qwz" in hooks else 1e-6)
        assert moved > 0.1, moved

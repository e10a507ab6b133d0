"""Attention over the tokens of many real ranks is as exact as on one device: forward and backward, every plan."""

from __future__ import annotations

import pytest
import torch
from attention_cases import PLANS, Outcome, chosen


def too_far(outcome: Outcome) -> dict[str, str]:
    """What is further off than it may be: {tensor: error and limit}."""
    errors, limits = outcome.errors(), outcome.limits()
    return {name: f"{errors[name]:.2e} > {limit:.2e}" for name, limit in limits.items() if not errors[name] <= limit}


@pytest.mark.parametrize("ranks", PLANS)
def test_errors_are_at_most_twice_those_of_one_device(ranks):
    found = {outcome.case.name: too_far(outcome) for outcome in chosen(ranks)}
    assert not {name: far for name, far in found.items() if far}


@pytest.mark.parametrize("ranks", PLANS)
def test_backward_keeps_q_k_v_o_and_lse_of_local_tokens(ranks):
    for outcome in chosen(ranks):
        case = outcome.case
        rows = case.batch * -(-case.length // case.plan.multiple) * case.plan.multiple // ranks
        kv_heads, size = max(case.heads[1], case.plan.grid[0]), case.dtype.itemsize
        expected = [
            rows * case.heads[0] * case.head_dim * size,
            rows * kv_heads * case.head_dim * size,
            rows * kv_heads * case.value_dim * size,
            rows * case.heads[0] * case.value_dim * size,
            rows * case.heads[0] * (8 if case.dtype == torch.float64 else 4),
        ]
        assert outcome.saved == [expected] * ranks, case.name

"""Faults that fail silently elsewhere, seeded on every rank: each is beyond what the tests of errors allow."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import torch
from attention_cases import CAUSAL, FULL, PADDED, Case, Outcome, attention2d, run_cases

from rewriter.ir import sequence_plan
from rewriter.runtime.attention import attention2d as attention2d_module
from rewriter.runtime.attention import exchanges, partial_merge, tiles


def merge_in_bf16():
    """Partial outputs are added up in the dtype that they travel in."""
    module = importlib.import_module("rewriter.kernels.merge")
    exact = module.merge_reference

    def rounded(parts):
        (o, lse), *others = parts
        for part in others:
            o, lse = exact([(o, lse), part])
            o = o.bfloat16()
        return o.float(), lse

    module.merge_reference = rounded


def merge_in_bf16_as_parts_arrive():
    add = partial_merge.add_part

    def rounded(numerator, top, denominator, o, lse):
        add(numerator, top, denominator, o, lse)
        numerator.copy_(numerator.bfloat16())

    partial_merge.add_part = rounded


def sum_gradients_in_bf16():
    attention2d_module.summed = lambda parts, dtype: sum(part.to(dtype) for part in parts)


def leave_keys_where_they_are():
    """Alg. 1 without line 1."""
    attention2d_module.moves = lambda grid: False


def forget_strictness():
    """Every class of keys is plainly causal."""
    staircase = tiles._staircase
    tiles._staircase = lambda rows, columns, offset: staircase(rows, columns, max(offset, 0))


def see_padding():
    sequence_plan.TokenRun.below = lambda run, length: run


def take_one_copys_gradient():
    """Of key/value heads that were repeated on the wire."""
    exchanges.summed_copies = lambda x, count: x[:, :: x.shape[1] // count]


def go_back_with_the_tiles_own_output():
    """Not with that over all keys: the gradients of tiles then do not add up."""
    backward = attention2d_module.tile_backward

    def local(do, q, k, v, o, lse, *rest):
        o, lse = attention2d_module.tile_forward(q, k, v, *rest[:-1])
        backward(do, q, k, v, o.to(q.dtype), lse, *rest)

    attention2d_module.tile_backward = local


ROW, SQUARE = attention2d(1, 1, 16), attention2d(1, 2, 2)
LONG = Case(ROW, (16, 4), 1000, FULL, torch.bfloat16, batch=1)
FAULTS = {
    merge_in_bf16: LONG,
    merge_in_bf16_as_parts_arrive: dataclasses.replace(LONG, plan=attention2d(1, 1, 16, overlap=True)),
    sum_gradients_in_bf16: LONG,
    leave_keys_where_they_are: Case(SQUARE, (16, 4), PADDED, CAUSAL),
    forget_strictness: Case(SQUARE, (16, 4), PADDED, CAUSAL),
    go_back_with_the_tiles_own_output: Case(SQUARE, (16, 4), PADDED, CAUSAL),
    see_padding: Case(SQUARE, (16, 4), PADDED, FULL),
    take_one_copys_gradient: Case(attention2d(4, 1, 1), (4, 2), 37),
}


def far(outcome: Outcome) -> bool:
    errors, limits = outcome.errors(), outcome.limits()
    return any(errors[name] > limits[name] for name in limits)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.fast("see_padding", "leave_keys_where_they_are", "forget_strictness")
def test_the_limits_of_errors_see(fault):
    (outcome,) = run_cases([FAULTS[fault]], fault)
    assert far(outcome)


def test_without_a_fault_all_is_within_the_limits():
    assert not any(far(outcome) for outcome in run_cases(list(FAULTS.values())))

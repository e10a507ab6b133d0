"""Mixers that carry a state, against fp64 recurrences of each row alone: whole sequences, and a cache in any steps."""

from __future__ import annotations

import functools
import inspect
import sys
from types import SimpleNamespace

import pytest
import torch
from mixer_cases import BATCH, CASES, PADDING, SPECS, Case

import rewriter.runtime as runtime
from rewriter import RewriterError
from rewriter.ir import ops
from rewriter.runtime import Context, SequenceAxis, SequenceCache, SlotSpec, StaticCache
from rewriter.runtime.mixers import convolution, delta_rule, kernels, scans, state_space

LENGTH = 150  # more than two chunks
RECURRENCES = [CASES[3], CASES[6], CASES[8], CASES[11], CASES[14]]


@functools.cache
def recurrence(name, length, padded):
    [case] = (case for case in CASES if str(case) == name)
    return case.expected(case.inputs(length), PADDING if padded else None)


def expected_of(case, length, padding=None):
    """What a case gives for `case.inputs(length)`: tokens one by one, which take longer than what is tested."""
    return recurrence(str(case), length, padding is not None)


def run(case: Case, inputs, ctx, slot=0, of=runtime):
    return getattr(of, case.name)(*inputs, ctx, slot=slot, **case.options)


def cast(inputs, dtype):
    return [None if x is None else x.to(dtype) for x in inputs]


def check(case, got, expected, padding=None, tolerance=1e-12):
    """At valid tokens, relative to the largest value."""
    for row in range(expected.shape[0]):
        first = 0 if padding is None else int(padding[row])
        ours, theirs = (x[row].movedim(case.at - 1, 0)[first:].double() for x in (got, expected))
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


def cached(case, inputs, steps, padding=None, cache=None, dtype=torch.float64, slot=0):
    """By a cache, in calls of so many tokens."""
    if cache is None:
        cache = StaticCache([SPECS[case.name]], BATCH, 9, dtype)
    pieces, at = [], 0
    for step in steps:
        ctx = Context(cache, torch.tensor(at) if at else None, padding)
        pieces.append(run(case, case.part(inputs, at, at + step), ctx, slot))
        at += step
    return torch.cat(pieces, case.at)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_specification(case):
    inputs = case.inputs(20)
    check(case, run(case, inputs, None, of=ops), case.expected(inputs))


@pytest.mark.parametrize("length", [1, 2, 64, LENGTH])
@pytest.mark.parametrize("padding", [None, PADDING], ids=["unpadded", "padded"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_whole_sequences(case, padding, length):
    length = max(length, 6) if padding is not None else length
    inputs, expected = case.inputs(length), expected_of(case, length, padding)
    check(case, run(case, inputs, Context(first_valid=padding)), expected, padding)
    got = run(case, cast(inputs, torch.float32), Context(first_valid=padding))
    assert got.dtype == torch.float32
    check(case, got, expected, padding, 2e-6)


@pytest.mark.parametrize(
    "steps",
    [[LENGTH], [30, 100, 20], [2, 1, 1, 70, *[1] * 3, 73], [1] * 12, [140, *[1] * 10]],
    ids=lambda s: str(len(s)),
)
@pytest.mark.parametrize("padding", [None, PADDING], ids=["unpadded", "padded"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_cache_continues_in_any_steps(case, padding, steps):
    """Calls within the padding of a row too."""
    inputs, expected = case.inputs(sum(steps)), expected_of(case, sum(steps), padding)
    check(case, cached(case, inputs, steps, padding), expected, padding)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_low_precision_stays_within_its_rounding(case, dtype):
    """States of recurrences are in fp32: rounding does not add up."""
    inputs = cast(case.inputs(LENGTH), dtype)
    expected, epsilon = case.expected(inputs), torch.finfo(dtype).eps
    cache = StaticCache([SPECS[case.name]], BATCH, 9, dtype)
    for got in (run(case, inputs, Context()), cached(case, inputs, [60, 60, *[1] * 30], cache=cache)):
        assert got.dtype == dtype
        check(case, got, expected, tolerance=2 * epsilon)
    assert cache.states[0].dtype == (torch.float32 if SPECS[case.name].fp32 else dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_equal_the_specification(case):
    compare_gradients(case, 70)


@pytest.mark.parametrize("case", RECURRENCES, ids=str)
def test_gradients_go_through_the_pieces_of_a_sequence(case):
    piece = {"delta_rule": delta_rule, "state_space": state_space}.get(case.name, scans)._PIECE
    compare_gradients(case, piece + 20, batch=1)


def compare_gradients(case, length, batch=BATCH):
    inputs = case.inputs(length, batch)
    ours, theirs = ([None if x is None else x.clone().requires_grad_() for x in inputs] for _ in range(2))
    run(case, ours, Context()).pow(3).sum().backward()
    run(case, theirs, None, of=ops).pow(3).sum().backward()
    for got, expected in zip(ours, theirs, strict=True):
        if got is not None:
            assert (got.grad - expected.grad).abs().max() <= 1e-10 * expected.grad.abs().max()


def test_padding_gives_no_gradient():
    for case in CASES:
        inputs = [None if x is None else x.requires_grad_() for x in case.inputs(12)]
        valid = run(case, inputs, Context(first_valid=PADDING)).movedim(case.at, 1)
        sum(valid[row, int(first) :].square().sum() for row, first in enumerate(PADDING)).backward()
        for row, first in enumerate(PADDING):
            written = inputs[0].grad[row].movedim(case.at - 1, 0) if case.name != "delta_rule" else inputs[2].grad[row]
            assert not written[: int(first)].any()
            assert written[int(first) :].any()


@pytest.mark.parametrize("decay", [0.001, 0.1, 1.0, 10.0, 1000.0])
@pytest.mark.parametrize("length", [100, 1000])
def test_sums_are_as_exact_as_those_of_a_recurrence(length, decay):
    """In fp32, where chunks are matrices: products of decays are exponentials of differences of sums."""
    for case in RECURRENCES:
        case = Case(case.name, case.options, case.absent, case.key_channels, decay)
        inputs = cast(case.inputs(length, batch=1), torch.float32)
        exact = run(case, cast(inputs, torch.float64), None, of=ops)
        ours, plain = (run(case, inputs, ctx, of=of) for ctx, of in ((Context(), runtime), (None, ops)))
        errors = [((x.double() - exact).abs().max() / exact.abs().max()).item() for x in (ours, plain)]
        assert errors[0] <= 2 * errors[1] + 1e-7, (case, errors)


def test_a_state_is_allocated_once_and_does_not_grow():
    slots = [SPECS["delta_rule"], SlotSpec(2, 4, 4), SPECS["causal_conv"]]
    cache = StaticCache(slots, BATCH, 20, torch.bfloat16)
    assert [x.shape[1:] for x in cache.states] == [torch.Size(SPECS[n].shape) for n in ("delta_rule", "causal_conv")]
    assert [x.dtype for x in cache.states] == [torch.float32, torch.bfloat16]
    assert StaticCache(slots, BATCH, 4000, torch.bfloat16).states[0].shape == cache.states[0].shape
    assert StaticCache(slots, BATCH, 20, torch.float64).states[0].dtype == torch.float64
    places = [x.data_ptr() for x in cache.states]
    case = CASES[3]
    cached(case, cast(case.inputs(30), torch.bfloat16), [20, *[1] * 10], cache=cache)
    assert cache.states[0].any()
    assert cache.first(3).states[0] is cache.states[0]
    assert [x.shape[2] for x in cache.first(3).keys if x.dim() == 4 and x.shape[1] == 2] == [3]
    assert cache.bound([2, 0]).states == [cache.states[1], cache.states[0]]
    assert cache.bound([2, 1]).fixed == [True, False]
    cache.clear()
    assert not cache.states[0].any()
    assert [x.data_ptr() for x in cache.states] == places


def test_a_prompt_begins_from_zeros_whatever_is_stored(monkeypatch):
    """A state that survives a prefill, and one that two calls share, are seen."""
    for case in (CASES[1], *RECURRENCES):
        inputs = case.inputs(20)
        cache = StaticCache([SPECS[case.name]] * 2, BATCH, 9, torch.float64)
        for steps in ([8, 12], [8, *[1] * 12], [1] * 20):
            check(case, cached(case, inputs, steps, cache=cache), case.expected(inputs))
        with monkeypatch.context() as fault:
            for module in (convolution, delta_rule, scans, state_space):
                fault.setattr(module, "state_before", lambda ctx, slot, name: ctx.cache.state(slot))
            difference = cached(case, inputs, [8, 12], cache=cache) - case.expected(inputs)
            assert difference.abs().max() > 1e-4
        for slots in ([0, 1], [0, 0]):
            other = case.inputs(21)
            got, at = [], 0
            for step in (9, 1, 10):
                ctx = Context(cache, torch.tensor(at) if at else None)
                got.append(run(case, case.part(inputs, at, at + step), ctx, slots[0]))
                run(case, case.part(other, at, at + step), ctx, slots[1])
                at += step
            difference = torch.cat(got, case.at) - case.expected(inputs)
            assert (difference.abs().max() < 1e-10) == (slots == [0, 1])


def test_what_a_state_cannot_do_is_refused():
    axis = SequenceAxis.__new__(SequenceAxis)
    with pytest.raises(RewriterError, match="slot 1 is a state that goes from token to token: its tokens cannot be"):
        SequenceCache([SlotSpec(1, 1, 1), SPECS["delta_rule"]], axis, 1, 6, torch.float32)
    for case in CASES:
        inputs = case.inputs(5)
        with pytest.raises(RewriterError, match=f"segment_ids with {case.name}, slot 0, whose state would cross"):
            run(case, inputs, Context(segment_ids=torch.zeros(BATCH, 5, dtype=torch.int64)))
        with pytest.raises(RewriterError, match="carries a state from token to token: its tokens cannot be sharded"):
            run(case, inputs, Context(shards=object()))
        inputs[0].requires_grad_()
        for step in (1, 5):
            cache = StaticCache([SPECS[case.name]], BATCH, 9, torch.float64)
            with pytest.raises(RewriterError, match="its states require a gradient"):
                run(case, case.part(inputs, 0, step), Context(cache))


def chunk_gated_delta_rule(
    q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False
):
    """fla's, for as many key heads as value heads."""
    assert q.dtype == k.dtype == v.dtype == beta.dtype == torch.bfloat16
    assert output_final_state
    return delta_rule._delta_rule(q, k, v, g, beta, initial_state, use_qk_l2norm_in_kernel, scale, True)


def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, cu_seqlens=None,
    dt_softplus=False, dt_limit=(0.0, float("inf")), return_final_states=False, return_varlen_states=False,
):  # fmt: skip
    assert return_final_states
    return state_space._state_space(x, dt, A, B, C, D, dt_bias, initial_states, dt_softplus, *dt_limit)


def selective_scan_fn(
    u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False
):
    assert return_last_state
    y, last = scans._selective_scan(u, delta, A, B, C, delta_bias, None, delta_softplus)
    return y.to(u.dtype), last


@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.parametrize("case", RECURRENCES, ids=str)
def test_kernels_of_other_packages_are_given_what_they_take(case, installed, monkeypatch):
    """Stand-ins of their signatures, as if tensors were on a GPU; an older one without an option is not used."""
    used = []

    def module(function, strip=False):
        def run(*given, **named):
            used.append(function.__name__)
            return function(*given, **named)

        if not strip:
            run.__signature__ = inspect.signature(function)
        return SimpleNamespace(**{function.__name__: run, "chunk_kda": run})

    places = {
        "fla.ops.gated_delta_rule": chunk_gated_delta_rule, "fla.ops.kda": chunk_gated_delta_rule,
        "mamba_ssm.ops.triton.ssd_combined": mamba_chunk_scan_combined,
        "mamba_ssm.ops.selective_scan_interface": selective_scan_fn,
    }  # fmt: skip
    for place, function in places.items():
        monkeypatch.setitem(sys.modules, place, module(function, strip=not installed))
    kernels._kernel.cache_clear()
    monkeypatch.setattr(kernels, "runs_kernels", lambda x: x.dtype == torch.bfloat16)
    inputs = cast(case.inputs(LENGTH), torch.bfloat16)
    cache = StaticCache([SPECS[case.name]], BATCH, 9, torch.bfloat16)
    got = cached(case, inputs, [60, 60, *[1] * 30], cache=cache)
    check(case, got, case.expected(inputs), tolerance=2e-2)
    calls = {"linear_scan": 0, "selective_scan": 1}.get(case.name, 2)
    assert len(used) == (calls if installed else 0)
    kernels._kernel.cache_clear()

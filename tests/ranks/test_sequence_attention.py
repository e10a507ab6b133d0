"""Attention over the tokens of many real ranks is as exact as on one device: forward and backward, every plan."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from attention_cases import (
    CAUSAL,
    DIVIDES,
    FULL,
    HEADS,
    PADDED,
    PLANS,
    RANKS,
    Case,
    attention_on,
    chosen,
    on_rank,
    possible,
    relative,
    ring,
    run_cases,
    ulysses,
)
from attention_cases import attention2d as grid
from ranks import run_ranks
from torch._dynamo.utils import counters

from rewriter.common.errors import RewriterError
from rewriter.ir.ops import MaskSpec, SequencePlan
from rewriter.passes.sequence.distributed_attention import AttentionShape, impossible, wire_bytes
from rewriter.passes.sequence.sequence_costs import memory
from rewriter.runtime import record_events, sequence_mesh
from rewriter.runtime.attention import tiles
from rewriter.runtime.attention.mesh import AttentionMesh
from rewriter.runtime.attention.sequence_axis import SequenceAxis
from rewriter.runtime.attention.sequence_op import sequence_attention
from rewriter.runtime.collectives import exchange


def too_far(outcomes: Any) -> dict[str, dict[str, str]]:
    """What is further off than it may be: {case: {tensor: error and limit}}."""
    found = {}
    for outcome in outcomes:
        errors, limits = outcome.errors(), outcome.limits()
        far = {n: f"{errors[n]:.2e} > {limits[n]:.2e}" for n in limits if not errors[n] <= limits[n]}
        if far:
            found[outcome.case.name] = far
    return found


# --- errors: at most twice those of one device in the same dtype, fp64 to 1e-13 ---


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.slow
def test_errors_are_at_most_twice_those_of_one_device(ranks):
    assert not too_far(chosen(ranks))


@pytest.mark.parametrize("ranks", RANKS)
def test_bytes_on_the_wire_and_kept_are_the_planners_on_every_rank(ranks):
    for outcome in chosen(ranks):
        case = outcome.case
        sizes = {"batch": case.batch, "dtype_bytes": case.dtype.itemsize}
        shape = AttentionShape(*case.heads, case.head_dim, case.value_dim, **sizes)
        planned = [wire_bytes(case.plan, shape, case.length, rank) for rank in range(ranks)]
        assert outcome.forward == [(p.forward, p.forward) for p in planned], case.name
        assert outcome.backward == [(p.backward, p.backward) for p in planned], case.name
        assert [sum(kept) for kept in outcome.saved] == [memory(case.plan, shape, case.length).saved] * ranks, case.name


@pytest.mark.slow
@pytest.mark.parametrize("ranks", PLANS)
def test_errors_of_the_whole_matrix(ranks):
    matrix = itertools.product(
        PLANS[ranks], HEADS, (DIVIDES, PADDED), (CAUSAL, FULL), (torch.float32, torch.bfloat16, torch.float64)
    )
    cases = [Case(plan, heads, *rest) for plan, heads, *rest in matrix if possible(plan, heads)]
    assert not too_far(run_cases(cases, timeout=900))


SPECIAL = {
    "window": {"mask": MaskSpec("window", 24)},
    "chunk": {"mask": MaskSpec("chunk", 40)},
    "left-padding": {"padding": 50},
    "packed": {"documents": (100, 150, 31)},
    "packed-window": {"documents": (100, 181), "mask": MaskSpec("window", 30), "padding": 9},
    "sinks": {"sinks": True},
    "sinks-left-padding": {"sinks": True, "padding": 50},
    "value-size": {"value_dim": 24, "head_dim": 12},
    "fewer-tokens-than-ranks": {"length": 3},
}


def test_windows_chunks_padding_packed_sequences_and_sinks_are_exact():
    plans = [grid(1, 2, 2), grid(2, 1, 2), grid(1, 2, 2, overlap=True), ulysses(4), ring(4)]
    cases = [
        Case(plan, **{"heads": (8, 4), "length": PADDED, "dtype": dtype, **options})
        for plan in plans
        for options in SPECIAL.values()
        for dtype in (torch.float64, torch.bfloat16)
        if dtype == torch.float64 or "sinks" not in options  # one device has no kernel with sinks to compare with
    ]
    assert not too_far(run_cases(cases))


# --- what backward keeps ---


@pytest.mark.parametrize("ranks", RANKS)
def test_backward_keeps_q_k_v_o_and_lse_of_local_tokens(ranks):
    """Alg. 1, line 7: nothing that was gathered."""
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


# --- the operator, compiled and by itself ---


def compiled(group, backend):
    """What differs from eager, by plan, and how many graphs were made."""
    found = []
    for sizes in ((1, 2, 2), (2, 2, 1)):
        torch._dynamo.reset()
        counters.clear()
        attend = attention_on(sequence_mesh("cpu", sizes), grid(*sizes))

        def layer(q, k, v, attend=attend):
            return attend(q * 2, k * 2, v * 2).sin()

        fast = torch.compile(layer, fullgraph=True, backend=backend)
        for tokens in (6, 9):
            torch.manual_seed(group.rank())
            leaves = [torch.randn(1, heads, tokens, 8, requires_grad=True) for heads in (4, 2, 2)]
            results = []
            for function in (layer, fast):
                o = function(*leaves)
                results.append([o, *torch.autograd.grad(o.sum(), leaves)])
            found.append(max(relative(*pair) for pair in zip(*results, strict=True)))
        found.append(counters["stats"]["unique_graphs"])
    return found


def checked(group):
    """torch's own checks of an operator, on ranks: schema, fake against real, autograd."""
    checks = "test_schema", "test_autograd_registration", "test_faketensor"
    plans = (grid(1, 2, 2), grid(2, 2, 1), grid(1, 1, 4), grid(1, 2, 2, overlap=True), ring(4))
    quantized = (dataclasses.replace(plan, quantized="int4@16") for plan in (*plans[:2], ring(4)))
    for plan in (*plans, *quantized):
        key = SequenceAxis(sequence_mesh("cpu", plan.grid), plan).key
        torch.manual_seed(group.rank())
        q, k, v, sinks = (
            torch.randn(*shape, requires_grad=True) for shape in ((2, 4, 6, 8), *[(2, 2, 6, 8)] * 2, (4,))
        )
        masks = torch.tensor([0, 3]), torch.arange(46).view(2, 23) // 7
        options = (*masks, sinks, key, "causal", None, 0.3, 23)
        torch.library.opcheck(torch.ops.rewriter.sequence_attention.default, (q, k, v, *options), test_utils=checks)


def test_the_operator_is_what_torch_expects_of_one():
    run_ranks(checked, 4)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_compiles_to_one_graph(backend):
    for first, second, graphs, *others in run_ranks(compiled, 4, backend, timeout=300):
        assert max(first, second, *others[:2]) < 1e-6
        assert graphs == others[2] == 2, "one for the first number of tokens, one for all others"


# --- refusals, before anything is sent ---


def lonely(plan: SequencePlan) -> str:
    """A key whose axis has no groups: sending anything would fail by another name."""
    heads, rows, columns = plan.grid
    members = tuple(range(rows * columns))
    return SequenceAxis(AttentionMesh(heads, rows, columns, 0, 0, 0, members, None, None, None), plan).key


def attend(dtype=torch.float32, key=None, **options):
    x = torch.zeros(1, 2, 4, 8, dtype=dtype)
    key = lonely(grid(1, 2, 2)) if key is None else key
    return sequence_attention(x, x, x, key, **{"mask": CAUSAL, "scale": 1.0, "length": 15, **options})


def test_what_cannot_be_is_refused_by_name_before_anything_is_sent():
    with record_events() as events, pytest.raises(RewriterError, match="'nobody' is not registered"):
        attend(key="nobody")
    assert not events


def test_a_plan_of_another_grid_than_the_mesh_and_an_unknown_format_are_refused():
    alone = AttentionMesh(1, 1, 1, 0, 0, 0, (0,), None, None, None)
    with pytest.raises(RewriterError, match=r"the mesh is a grid of \[1, 1, 1\]"):
        SequenceAxis(alone, grid(1, 2, 2))
    with pytest.raises(RewriterError, match="format 'int5': expected one of int8"):
        SequenceAxis(alone, dataclasses.replace(grid(1, 1, 1), quantized="int5"))


@pytest.mark.parametrize("heads", [*HEADS, (32, 8), (12, 3), (8, 1)], ids=lambda h: f"{h[0]}-{h[1]}")
def test_the_planner_plans_what_runs(heads):
    for h in range(1, 13):
        plan = grid(h, 2, 1)
        assert (impossible(plan, AttentionShape(*heads, 8, 8)) is None) == possible(plan, heads), plan


def test_a_message_holds_tensors_of_any_strides_rounded_and_in_order() -> None:
    """Also where a tensor begins at a byte at which its elements could not be read in place."""
    o, lse = torch.randn(1, 3, 10, 5), torch.randn(1, 3, 10)
    sharded = [o[:, :, 1::2], lse[:, :, 1::2], o.transpose(2, 3)]  # 75 elements of 2 bytes, then of 4
    dtypes = [torch.bfloat16, torch.float32, torch.float32]
    rounded = [x.to(dtype).contiguous() for x, dtype in zip(sharded, dtypes, strict=True)]
    message = exchange.pack(sharded, dtypes)
    assert torch.equal(message, torch.cat([x.view(-1).view(torch.uint8) for x in rounded]))
    found = exchange.unpack(message, rounded)
    assert all(torch.equal(x, y) for x, y in zip(found, rounded, strict=True))
    assert exchange.pack([lse]).data_ptr() == lse.data_ptr()
    assert exchange.pack([lse], [torch.float64]).data_ptr() != lse.data_ptr()
    row = torch.empty(2, message.numel() + 1, dtype=torch.uint8)[1]  # of a gather's buffer, at an odd byte
    assert exchange.pack(sharded, dtypes, out=row[1:]).data_ptr() == row[1:].data_ptr()
    assert torch.equal(row[1:], message)


def test_a_mesh_without_a_process_group_says_what_to_call():
    with pytest.raises(RewriterError, match=r"no process group.*torchrun.*init_process_group\("):
        sequence_mesh("cpu", (1, 2, 2))


# --- what kernels on other devices need, seen on this one ---


def addresses(group):
    """Where the q, k, v, o and do that kernels read in place lie, modulo the 16 bytes that CUDA reads at a time."""
    found = []

    def watched(kernel):
        def call(*given):
            whole = [x for x in given if isinstance(x, torch.Tensor) and x.dim() == 4 and x.is_floating_point()]
            found.extend(x.data_ptr() % 16 for x in whole if x.is_contiguous())
            return kernel(*given)

        return call

    for name in ("kernel_forward", "kernel_backward"):
        setattr(tiles, name, watched(getattr(tiles, name)))
    plans = [grid(1, 2, 2), grid(1, 2, 2, overlap=True), grid(1, 1, 4, overlap=True), grid(1, 4, 1), ring(4)]
    on_rank(group, [Case(plan, (9, 3), 28, dtype=torch.bfloat16, head_dim=8, batch=1) for plan in plans])
    return found


def test_kernels_read_at_multiples_of_16_bytes():
    """Nine heads of seven tokens on a rank: what follows their log-sum-exps in a message begins elsewhere."""
    for found in run_ranks(addresses, 4):
        assert found
        assert not any(found)

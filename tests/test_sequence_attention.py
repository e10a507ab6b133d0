"""Attention over the tokens of many real ranks is as exact as on one device: forward and backward, every plan."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import unittest.mock
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
    chosen,
    on_rank,
    possible,
    reference,
    relative,
    ring,
    run_cases,
    ulysses,
)
from attention_cases import attention2d as grid
from ranks import run_ranks
from torch._dynamo.utils import counters

from rewriter.analysis.attention_shape import AttentionShape
from rewriter.analysis.distributed_attention import impossible
from rewriter.common.errors import RewriterError
from rewriter.ops import MaskSpec, SequencePlan
from rewriter.runtime import exchange, record_events, sequence_mesh
from rewriter.runtime.attention import attention2d, mesh_functions, ring_attention, tiles, ulysses_attention
from rewriter.runtime.attention.algorithms import register
from rewriter.runtime.attention.mesh import AttentionMesh
from rewriter.runtime.attention.sequence_op import check_heads, sequence_attention
from rewriter.sequence.token_layout import join_tokens, take_tokens


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
def test_errors_are_at_most_twice_those_of_one_device(ranks):
    assert not too_far(chosen(ranks))


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


# --- the functions, with a mesh, and compiled ---


def call_functions(group):
    """Each function once on its kind of mesh: own o and dq by name."""
    meshes = {
        "grid": sequence_mesh("cpu", (1, 2, 2)),
        "heads": sequence_mesh("cpu", (2, 1, 2)),
        "line": torch.distributed.init_device_mesh("cpu", (4,)),
    }
    case = Case(grid(1, 1, 1), (8, 4), 30, dtype=torch.float64, padding=3, documents=(10, 20))
    masked = {"first_valid": case.first_valid, "segment_ids": case.segments, "length": 30}
    calls = {
        "grid": (attention2d, "grid", "cyclic", masked),
        "heads": (attention2d, "heads", "cyclic", masked),
        "line": (attention2d, "line", "cyclic", masked),
        "overlap": (attention2d, "grid", "cyclic", {**masked, "overlap": True}),
        "ring": (ring_attention, "line", "zigzag", masked),
        "ulysses": (ulysses_attention, "line", "cyclic", masked),
        "window": (attention2d, "grid", "cyclic", {"window": 5, "scale": 0.5, "length": 30}),
        "full": (ulysses_attention, "line", "cyclic", {"causal": False}),
        **{
            f"{name} int4": (function, mesh, layout, {**masked, "quantized": "int4@16"})
            for name, function, mesh, layout in (
                ("grid", attention2d, "grid", "cyclic"),
                ("ring", ring_attention, "line", "zigzag"),
                ("ulysses", ulysses_attention, "line", "cyclic"),
            )
        },
    }
    found = {}
    for name, (function, mesh, layout, options) in calls.items():
        x = {n: t if "length" in options else t[:, :, :28] for n, t in case.inputs().items()}
        own = {n: take_tokens(t, 2, layout, group.rank(), 4) for n, t in x.items()}
        do = own.pop("do")
        q, k, v = (t.requires_grad_() for t in own.values())
        o = function(q, k, v, meshes[mesh], **options)
        found[name] = o.detach(), torch.autograd.grad(o, q, do)[0]
    x = torch.zeros(1, 4, 8, 8)
    with record_events() as events:
        for function, mesh, options, message in (
            (ring_attention, "grid", {}, r"ring: grid \[1, 2, 2\]: a ring of 4 has the grid \[1, 4, 1\]"),
            (ulysses_attention, "grid", {}, r"ulysses: grid \[1, 2, 2\]: Ulysses on 4 has the grid \[4, 1, 1\]"),
            (attention2d, "grid", {"window": 3, "causal": False}, "attention2d: window=3 without causal"),
            (ring_attention, "line", {"window": 0}, "ring_attention: window=0; expected at least 1"),
            (ulysses_attention, "line", {"quantized": "int5"}, "format 'int5': expected one of int8"),
        ):
            with pytest.raises(RewriterError, match=message):
                function(x, x, x, meshes[mesh], **options)
    assert not events
    return found


def test_the_functions_take_a_mesh_and_every_option_and_refuse_what_does_not_fit():
    masked = Case(grid(1, 1, 1), (8, 4), 30, dtype=torch.float64, padding=3, documents=(10, 20))
    found = run_ranks(call_functions, 4)
    for name in ("grid", "heads", "line", "overlap", "ring", "ulysses"):
        for index, tensor in enumerate(("o", "dq")):
            layout = "zigzag" if name == "ring" else "cyclic"
            joined = join_tokens([rank[name][index] for rank in found], 2, layout, 30)
            assert relative(joined, reference(masked)[tensor]) < 1e-13, (name, tensor)
    quantized = {
        name: [join_tokens([rank[f"{name} int4"][index] for rank in found], 2, layout, 30) for index in range(2)]
        for name, layout in (("grid", "cyclic"), ("ring", "zigzag"), ("ulysses", "cyclic"))
    }
    for index, tensor in enumerate(("o", "dq")):  # one function on every grid, and another than the exact one
        assert relative(quantized["grid"][index], reference(masked)[tensor]) > 1e-2
        for name in ("ring", "ulysses"):
            assert relative(quantized[name][index], quantized["grid"][index]) < 1e-13, (name, tensor)
    x = masked.inputs()
    t = torch.arange(30)
    near = (t[None] <= t[:, None]) & (t[:, None] - t[None] < 5)
    for name, length, seen, scale in (("window", 30, near, 0.5), ("full", 28, near[:28, :28] | True, 0.25)):
        q, k, v = (x[n][:, :, :length].repeat_interleave(1 if n == "q" else 2, 1) for n in "qkv")
        weights = (q @ k.transpose(-1, -2) * scale).masked_fill(~seen, -torch.inf).softmax(-1)
        joined = join_tokens([rank[name][0] for rank in found], 2, "cyclic", length)
        assert relative(joined, weights @ v) < 1e-13, name


def compiled(group, backend):
    """What differs from eager, by plan, and how many graphs were made."""
    found = []
    for sizes in ((1, 2, 2), (2, 2, 1)):
        torch._dynamo.reset()
        counters.clear()
        mesh = sequence_mesh("cpu", sizes)

        def layer(q, k, v, mesh=mesh):
            return attention2d(q * 2, k * 2, v * 2, mesh).sin()

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
        key = register(plan, AttentionMesh.of(sequence_mesh("cpu", plan.grid)))
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
def test_compiles_to_one_graph(backend):
    for first, second, graphs, *others in run_ranks(compiled, 4, backend, timeout=300):
        assert max(first, second, *others[:2]) < 1e-6
        assert graphs == others[2] == 2, "one for the first number of tokens, one for all others"


# --- refusals, before anything is sent ---


def lonely(plan: SequencePlan) -> str:
    """A key whose axis has no groups: sending anything would fail by another name."""
    heads, rows, columns = plan.grid
    return register(plan, AttentionMesh(heads, rows, columns, 0, 0, 0, tuple(range(rows * columns)), None, None, None))


def attend(plan, q=(1, 9, 4, 8), k=(1, 3, 4, 8), v=(1, 3, 4, 8), dtypes=(torch.float32,) * 3, **options):
    tensors = [torch.zeros(shape, dtype=dtype) for shape, dtype in zip((q, k, v), dtypes, strict=True)]
    return sequence_attention(*tensors, lonely(plan), **{"mask": CAUSAL, "scale": 1.0, "length": 15, **options})


REFUSED = {
    "query heads": ({"plan": grid(2, 3, 1)}, "9 query heads do not divide by heads=2: choose a grid with heads 1 or 3"),
    "no heads but one": ({"plan": ulysses(4)}, "9 query heads do not divide by heads=4: choose a grid with heads 1$"),
    "key heads": (
        {"plan": grid(2, 2, 1), "q": (1, 12, 4, 8)},
        "3 key/value heads do not divide by heads=2: choose a grid with heads 1$",
    ),
    "groups": ({"q": (1, 8, 4, 8)}, "8 query heads do not divide by 3 key/value heads"),
    "length": ({"length": 17}, "17 tokens on 4 ranks are 5 on each, padding included, but q has 4"),
    "dimensions": ({"q": (9, 4, 8)}, r"q \[9, 4, 8\].* expected \[batch, heads, tokens, head size\]"),
    "tokens": ({"k": (1, 3, 5, 8)}, "expected equal batches and local tokens"),
    "values": ({"v": (1, 9, 4, 8)}, "k and v of as many heads"),
    "dtypes": ({"dtypes": (torch.float32, torch.bfloat16, torch.float32)}, "k torch.bfloat16.* one floating dtype"),
    "first_valid": ({"first_valid": torch.zeros(2)}, r"first_valid \[2\]; expected one position a row, \[1\]"),
    "segments": ({"segment_ids": torch.zeros(1, 4)}, r"segment_ids \[1, 4\]; expected .* \[1, 15\]"),
    "sinks": ({"sinks": torch.zeros(3)}, r"sinks \[3\]; expected one a query head, \[9\]"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_by_name_before_anything_is_sent(options, message):
    with record_events() as events, pytest.raises(RewriterError, match=message):
        attend(**{"plan": grid(1, 2, 2), **options})
    assert not events


def test_a_plan_of_another_grid_than_the_mesh_and_an_unknown_key_are_refused():
    alone = AttentionMesh(1, 1, 1, 0, 0, 0, (0,), None, None, None)
    with pytest.raises(RewriterError, match=r"the mesh is a grid of \[1, 1, 1\]"):
        register(grid(1, 2, 2), alone)
    x = torch.zeros(1, 1, 1, 1)
    with pytest.raises(RewriterError, match="'nobody' is not registered"):
        sequence_attention(x, x, x, "nobody", mask=CAUSAL, scale=1.0, length=1)


@pytest.mark.parametrize("heads", [*HEADS, (32, 8), (12, 3), (8, 1)], ids=lambda h: f"{h[0]}-{h[1]}")
def test_the_planner_plans_what_runs(heads):
    """Its reasons and these refusals name the same heads and grids."""
    for h in range(1, 13):
        plan, refused = grid(h, 2, 1), False
        try:
            check_heads(plan, *heads)
        except RewriterError:
            refused = True
        assert refused == (impossible(plan, AttentionShape(*heads, 8, 8)) is not None), plan


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


def looked_up(group):
    """Whether three calls on a mesh and one on a mesh that equals it make a grid each; how many are kept afterwards."""
    made, of = [], AttentionMesh.of
    with unittest.mock.patch.object(AttentionMesh, "of", lambda mesh: made.append(id(mesh)) or of(mesh)):
        meshes = [torch.distributed.init_device_mesh("cpu", (2,)) for _ in range(2)]
        x = torch.zeros(1, 2, 4, 8)
        for mesh in (meshes[0], meshes[0], meshes[1], meshes[0]):
            attention2d(x, x, x, mesh)
    once_each = made == [id(mesh) for mesh in meshes]
    del mesh, meshes
    gc.collect()
    return once_each, len(mesh_functions._attention_mesh.found)


def test_a_mesh_is_looked_up_once_and_by_what_it_is():
    """An equal one may have other process groups."""
    assert run_ranks(looked_up, 2) == [(True, 0)] * 2

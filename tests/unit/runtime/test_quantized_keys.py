"""Keys and values that travel quantized: attention over ranks is that of one device on the dequantized ones, to its
rounding, on every plan; bytes on the wire and bytes kept are the planner's."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import pytest
import torch
from attention_cases import (
    DIVIDES,
    FULL,
    PADDED,
    Case,
    attention2d,
    relative,
    ring,
    run_cases,
    single_device,
    ulysses,
)
from attention_cases import reference as exact_reference
from torch import Tensor

from rewriter.common.errors import RewriterError
from rewriter.ir.ops import MaskSpec, SequencePlan
from rewriter.kernels import (
    dequantize,
    dequantize_rows,
    dequantize_vectors,
    parse_format,
    quantize,
    quantize_rows,
    quantize_vectors,
    vector_bytes,
)
from rewriter.passes.sequence.distributed_attention import AttentionShape, wire_bytes
from rewriter.passes.sequence.sequence_costs import memory
from rewriter.runtime.attention.attention_call import QuantizedKV
from rewriter.runtime.attention.mesh import AttentionMesh
from rewriter.runtime.attention.ring import RING
from rewriter.runtime.attention.sequence_axis import ALGORITHMS, SequenceAxis

# --- vectors ---


@pytest.mark.parametrize("name", ["int8", "fp8@32", "int6@16", "int4-hadamard@64", "int3-hadamard@32", "int2@64"])
@pytest.mark.parametrize("size", [128, 100, 16])
def test_a_vector_is_quantized_as_by_itself_and_can_be_taken_out(name, size):
    format = parse_format(name)
    x = torch.randn(2, 3, 5, size)
    packed = quantize_vectors(x, format)
    found = dequantize_vectors(packed, format, size, torch.float32)
    alone = torch.stack([dequantize(quantize(row, format), format, row.shape, row.dtype) for row in x.view(-1, size)])
    assert packed.shape[-1] == vector_bytes(format, size) <= format.payload_bytes(size)
    assert torch.equal(found, alone.view(x.shape))
    some = packed.transpose(1, 2)[:, ::2, 1:]
    assert torch.equal(dequantize_vectors(some, format, size, torch.float32), found.transpose(1, 2)[:, ::2, 1:])


@pytest.mark.parametrize(
    ("name", "size", "expected"),
    [
        ("int8", 128, 130),
        ("int4-hadamard", 128, 66),
        ("int8@64", 64, 66),
        ("int8", 64, 130),
        ("fp8@64", 64, 66),
        ("int6@16", 80, 70),
    ],
)
def test_a_vector_of_whole_blocks_has_its_codes_and_scales_and_nothing_else(name, size, expected):
    """Of 128 elements 130 bytes in int8, of 64 the same: filled up, so that a block of 64 is what they want."""
    assert vector_bytes(parse_format(name), size) == expected


# --- on ranks ---


@dataclass(frozen=True)
class Dequantized(Case):
    """The case whose k and v are as they arrive: each vector of a head quantized and dequantized by itself."""

    format: str = "int8"

    def inputs(self) -> dict[str, Tensor]:
        found = super().inputs()
        for name in "kv":
            rows = found[name].reshape(-1, found[name].shape[-1])
            read = dequantize_rows(quantize_rows(rows.float(), self.format), self.format, rows.shape[1], torch.float32)
            found[name] = read.view(found[name].shape).to(self.dtype)
        return found


def on(plan: SequencePlan, format: str, min_bytes: int = 0) -> SequencePlan:
    return dataclasses.replace(plan, quantized=format, min_bytes=min_bytes)


GRID, OVERLAPPED = attention2d(1, 2, 2), attention2d(1, 2, 2, overlap=True)
FLOATS = {"heads": (8, 4), "dtype": torch.float64, "batch": 1}
CASES = [
    *(
        Case(on(plan, format), **{"length": 37, **FLOATS, **options})
        for plan in (GRID, OVERLAPPED, ring(4), ulysses(4))
        for format, options in (
            ("int8@16", {}),
            ("int4@32", {"head_dim": 12, "value_dim": 24, "mask": MaskSpec("window", 9), "batch": 2}),  # filled up
        )
    ),
    Case(on(ulysses(4), "int6@16"), **{**FLOATS, "heads": (8, 2)}, length=30),  # heads are repeated on the wire
    Case(on(attention2d(2, 2, 1), "int8@16"), **FLOATS, length=30, sinks=True, padding=4),
    Case(on(ring(4), "fp8@16"), **FLOATS, length=37),
    Case(on(attention2d(2, 1, 2), "int3-hadamard@16"), **FLOATS, length=30),
    Case(on(GRID, "int8@16"), (16, 4), PADDED, dtype=torch.bfloat16),
    Case(on(ring(4), "int4@16"), (16, 4), DIVIDES, mask=FULL, dtype=torch.bfloat16),
]
# of 10 tokens on a rank, 4 heads, 16 + 16 elements of 8 bytes
LEAST = 10 * 4 * 32 * 8
BOUNDARY = [Case(on(GRID, "int8@16", LEAST + more), length=37, **FLOATS) for more in (0, 1)]


@functools.cache
def outcomes():
    return run_cases([*CASES, *BOUNDARY])


def oracle(case: Case) -> Dequantized:
    fields = {f.name: getattr(case, f.name) for f in dataclasses.fields(case)}
    return Dequantized(**{**fields, "plan": attention2d(1, 1, 1)}, format=case.plan.quantized)


def far(outcome) -> dict[str, str]:
    """What is further from attention on the dequantized keys and values than it may be."""
    against = dataclasses.replace(outcome, case=oracle(outcome.case))
    errors, limits = against.errors(), against.limits()
    return {n: f"{errors[n]:.2e} > {limits[n]:.2e}" for n in limits if not errors[n] <= limits[n]}


def test_attention_and_all_gradients_are_those_of_one_device_on_the_dequantized_keys_and_values():
    wrong = {outcome.case.name: found for outcome in outcomes()[: len(CASES)] if (found := far(outcome))}
    assert not wrong


def test_the_oracle_itself_is_visibly_another_function():
    """Else the test above would not tell quantized keys from exact ones."""
    case = oracle(CASES[0])
    for name, found in exact_reference(case).items():
        assert relative(found, exact_reference(CASES[0].alone)[name]) > 1e-3, name
    assert single_device(oracle(CASES[-1]))["o"].dtype == torch.bfloat16


def test_messages_below_min_bytes_are_exact():
    at, below = outcomes()[len(CASES) :]
    assert not far(at)
    assert far(below)
    assert all(error <= 1e-13 for error in below.errors().values())


def test_bytes_sent_and_kept_are_the_planners():
    for outcome in outcomes():
        case, plan = outcome.case, outcome.case.plan
        shape = AttentionShape(
            *case.heads, case.head_dim, case.value_dim, batch=case.batch, dtype_bytes=case.dtype.itemsize
        )
        planned = [wire_bytes(plan, shape, case.length, rank) for rank in range(4)]
        assert outcome.forward == [(p.forward, p.forward) for p in planned], case.name
        assert outcome.backward == [(p.backward, p.backward) for p in planned], case.name
        beside = sum(t.nbytes for t in (case.inputs().get("sinks"), case.first_valid) if t is not None)
        assert [sum(saved) - beside for saved in outcome.saved] == [memory(plan, shape, case.length).saved] * 4


def test_int8_halves_what_a_ring_of_bf16_keys_sends_forward():
    shape = AttentionShape(32, 8, 128, 128)
    plain, quantized = (wire_bytes(plan, shape, 4096, 0) for plan in (ring(4), on(ring(4), "int8")))
    assert quantized.forward * 256 == plain.forward * 130
    vectors = 3 * ring(4).local_tokens(4096) * 8 * 2
    assert plain.backward - quantized.backward == vectors * (256 - 130)


# --- faults ---


def remember_exact(when):
    """Where a block of keys is the rank's own, compute with the exact ones: always, or in backward alone."""
    closed, opened = QuantizedKV.closed, QuantizedKV.opened
    own, inside = [], []

    def closing(self, k, v):
        own[:] = [(closed(self, k, v), (k, v))]
        return own[0][0]

    def opening(self, k, v):
        (packed, exact) = own[0]
        if (inside or when == "always") and torch.equal(packed[0], k):
            return exact
        return opened(self, k, v)

    def going_back(*arguments):
        inside.append(True)
        try:
            return RING.backward(*arguments)
        finally:
            inside.clear()

    QuantizedKV.closed, QuantizedKV.opened = closing, opening
    ALGORITHMS["ring"] = (dataclasses.replace(RING, backward=going_back),) * 2


def requantize_in_backward():
    """The keys that backward gathers are quantized once more, in a coarser format."""
    opened, coarse, inside = QuantizedKV.opened, parse_format("int6@16"), []

    def opening(self, k, v):
        found = opened(self, k, v)
        if inside:
            again = (quantize_vectors(x, coarse) for x in found)
            found = tuple(dequantize_vectors(x, coarse, 16, torch.float64) for x in again)
        return found

    def going_back(*arguments):
        inside.append(True)
        return RING.backward(*arguments)

    QuantizedKV.opened = opening
    ALGORITHMS["ring"] = (dataclasses.replace(RING, backward=going_back),) * 2


FAULTS = {
    "owner_computes_with_exact_keys": (functools.partial(remember_exact, "always"), {"o", "dq", "dk", "dv"}),
    "backward_computes_with_exact_keys": (functools.partial(remember_exact, "backward"), {"dq", "dk"}),
    "backward_quantizes_again": (requantize_in_backward, {"dq", "dk"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_sees(fault):
    prepare, seen = FAULTS[fault]
    (outcome,) = run_cases([Case(on(ring(4), "int8@16"), length=37, **FLOATS)], prepare)
    assert seen <= set(far(outcome))


def test_an_unknown_format_is_refused_by_name():
    alone = AttentionMesh(1, 4, 1, 0, 0, 0, (0, 1, 2, 3), None, None, None)
    with pytest.raises(RewriterError, match=r"ring 1×4×1, keys and values int5: format 'int5': expected one of int8"):
        SequenceAxis(alone, on(ring(4), "int5"))

"""Attention of one new token over a cache: the specification against fp64 in Python, the kernels against the
specification in Triton's interpreter and compiled for GPUs that are not here, and the runtime that calls them."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import decode_steps as steps
import pytest
import subprocesses
import torch
import zoo
from attention_inputs import BATCH, EXTRAS, HEAD, LENGTH, MASKS, PADDING, check, inputs, naive
from decode_attention_cases import SHAPES, make, written_out
from host_reads import HostReads

from rewriter.kernels import decode_attention
from rewriter.runtime import Context, SlotSpec, StaticCache, attention, generate

as_on_a_gpu = steps.as_on_a_gpu
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="Triton exists for Linux only")


@cache
def interpreted(*arguments: str) -> dict[str, float]:
    """Errors of the kernels by case, or by fault; see tests/support/decode_attention_interpreted.py."""
    found: dict[str, float] = subprocesses.interpreted("decode_attention_interpreted.py", *arguments, timeout=300)
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_specification_is_the_softmax_written_out(shape: str, dtype: torch.dtype) -> None:
    case = make(shape, dtype)
    o = decode_attention(*case.arguments, **case.options)
    assert o.dtype == dtype
    summed = 1e-13 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(o.double(), written_out(case), rtol=torch.finfo(dtype).eps / 2, atol=summed)


# In steps of the dtype: of bf16 weights and o are rounded, and the interpreter cuts them off; of fp32 scores are off by
# some steps.
LIMITS = {"fp32": 16, "bf16": 2}


@on_linux
@pytest.mark.parametrize("each", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_the_kernels_are_the_specification(each: str) -> None:
    cases = {case: error for case, error in interpreted(each).items() if "splits" in case}
    assert len(cases) == len(SHAPES) * (1 if each == "few" else 4)
    assert {case: error for case, error in cases.items() if not error < LIMITS[case[:4]]} == {}


@on_linux
@pytest.mark.parametrize("case", ["rows that are not contiguous", "NaN that is seen shows", "the operator"])
def test_other_cases(case: str) -> None:
    assert interpreted("few")[case] < (16 if "rows" in case else 1)


@on_linux
@pytest.mark.slow
def test_faults_in_the_kernels_are_seen() -> None:
    found = interpreted("faults")
    assert len(found) == 18
    assert {fault: error for fault, error in found.items() if not error > 1000} == {}


@pytest.mark.slow
@on_linux
def test_models_generate_the_same_tokens_by_the_kernels() -> None:
    found = interpreted("models")
    assert found == dict.fromkeys(("llama: tokens", "llama: calls", "gemma2: tokens", "gemma2: calls"), 0)


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The module that compiles."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from benchmarks.kernels import decode_attention_code

    return decode_attention_code


@on_linux
@pytest.mark.parametrize(
    ("capability", "dtype", "size"),
    [
        pytest.param(capability, dtype, size, marks=() if on == capability else pytest.mark.slow)
        for on, dtype, size in ((90, "bf16", 80), (100, "bf16", 128), (80, "fp32", 64))
        for capability in (80, 90, 100)
    ],
)
@pytest.mark.slow
def test_compiled_kernels(code: Any, capability: int, dtype: str, size: int) -> None:
    """Tensor cores for bf16, fp32 that is not rounded to TF32, copies of whole vectors ahead of their use, all in
    registers, and two blocks' shared memory on every multiprocessor of these."""
    made = code.parts(capability, dtype, size, 8, capped=size == 128)
    ptx = made.code.ptx
    assert f".target sm_{capability}" in ptx
    assert ("mma.sync" in ptx) == (dtype == "bf16")
    assert "tf32" not in ptx
    assert made.copies(16) >= 16
    assert (made.copies(4), made.copies(8)) == (0, 0)
    assert (made.code.stack, made.code.local) == (0, 0)
    assert made.code.registers <= 128
    assert made.shared <= 80 * 1024


@on_linux
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.slow
def test_the_compiled_merge(code: Any, capability: int) -> None:
    merged = code.merge(capability, "bf16", 128, 128)
    assert (merged.code.stack, merged.code.local) == (0, 0)
    assert merged.code.registers <= 64
    assert merged.code.loads == 8  # vectors of a thread, of 128 parts of 32 columns in fp32


@on_linux
def test_parts_fill_the_device() -> None:
    from rewriter.kernels.decode_attention_triton import splits_for

    assert splits_for(1, 32768, 64, 132) == 128
    assert splits_for(8, 32768, 64, 132) == 16
    assert splits_for(8, 300, 64, 132) == 5  # no more than tiles
    assert splits_for(200, 32768, 64, 132) == 1


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As on a GPU, new tokens are attended without masks: the lengths T of the slots for which that was done."""
    room: Any = sys.modules["rewriter.runtime.attention.cached"]
    found: list[int] = []

    def counted(q: torch.Tensor, keys: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        found.append(keys.shape[2])
        return decode_attention(q, keys, *rest, **options)

    monkeypatch.setattr(room, "without_masks", lambda q: True)
    monkeypatch.setattr(room, "decode_attention", counted)
    return found


@pytest.mark.parametrize("padding", [None, PADDING], ids=["unpadded", "padded"])
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("mask", MASKS[:3], ids=lambda mask: mask.kind)
def test_the_runtime_sees_the_same_without_masks(
    mask: Any, extra: str, padding: torch.Tensor | None, calls: list[int]
) -> None:
    """A cache that is in order for windows, too: they are longer than it, or the slot does not say."""
    q, k, v = inputs(2, head_v=6)
    cache = StaticCache([SlotSpec(2, HEAD, 6)], BATCH, LENGTH + 2, torch.float32)
    pieces = []
    for at, step in ((0, 4), (4, 2), *((at, 1) for at in range(6, LENGTH))):
        ctx = Context(cache, torch.tensor(at) if at else None, padding)
        part = [x[:, :, at : at + step] for x in (q, k, v)]
        pieces.append(attention(*part, ctx, slot=0, mask=mask, scale=0.4, **EXTRAS[extra]))
    check(torch.cat(pieces, 2), naive(q, k, v, mask, 0.4, padding, **EXTRAS[extra]), padding)
    assert calls == [LENGTH + 2] * 5


@pytest.mark.parametrize("padding", [None, PADDING], ids=["unpadded", "padded"])
def test_a_ring_is_seen_without_masks_and_a_whole_prompt_with_them(
    padding: torch.Tensor | None, calls: list[int]
) -> None:
    """The memory has the window's length, which the tokens pass more than twice."""
    q, k, v = inputs(2)
    mask = next(mask for mask in MASKS if mask.kind == "window")
    assert mask.size * 2 < LENGTH
    cache = StaticCache([SlotSpec(2, HEAD, HEAD, mask.size)], BATCH, LENGTH, torch.float32)
    pieces = []
    for at, step in ((0, 2), *((at, 1) for at in range(2, LENGTH))):
        ctx = Context(cache, torch.tensor(at) if at else None, padding)
        pieces.append(attention(*(x[:, :, at : at + step] for x in (q, k, v)), ctx, slot=0, mask=mask, scale=0.4))
    check(torch.cat(pieces, 2), naive(q, k, v, mask, 0.4, padding), padding)
    assert calls == [mask.size] * (LENGTH - 2)


NEW = 12
FAMILIES = ["llama", "gemma2"]  # of gemma2, every other layer has a window shorter than the prompts


@pytest.mark.parametrize("family", FAMILIES)
def test_models_generate_the_same_tokens(family: str, request: pytest.FixtureRequest) -> None:
    model, vocabulary = steps.emitted(family), zoo.config(family).vocab_size
    prompts = zoo.prompts(4, vocabulary)  # of several lengths: padded
    expected = generate(model, prompts, NEW)
    calls: list[int] = request.getfixturevalue("calls")
    assert generate(model, prompts, NEW) == expected
    assert len(calls) == len(model.slots) * (NEW - 1)
    assert len(set(calls)) == {"llama": 1, "gemma2": 2}[family], "rings are shorter"
    model = steps.emitted(family)
    assert generate(model, prompts, NEW, prefill_chunk=1) == expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.fast("llama")
def test_a_step_without_masks_replays_and_reads_nothing(family: str, request: pytest.FixtureRequest) -> None:
    model, prompts = steps.emitted(family), steps.prompts_of(family)
    expected = generate(model, prompts, steps.STEPS)
    request.getfixturevalue("as_on_a_gpu")
    calls: list[int] = request.getfixturevalue("calls")
    model = steps.emitted(family)
    got, again = steps.replayed(model, prompts)
    assert got == again == expected
    step = steps.begun(model, prompts)
    calls.clear()
    with torch.no_grad(), HostReads() as reads:
        step.run()
    assert not reads.counts
    assert calls == [keys.shape[2] for keys in step.cache.keys]

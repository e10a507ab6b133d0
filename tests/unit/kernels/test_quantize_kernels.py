"""The kernels of quantized messages against their specification in Triton's interpreter, and what they compile to."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import subprocesses
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rewriter.kernels import parse_format

Found = dict[str, dict[str, float]]
FORMATS = ["int8", "int6", "int4", "int2", "fp8", "int4-hadamard", "int3-hadamard", "int2-hadamard"]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton exists for Linux only")


@cache
def interpreted(*groups: str) -> dict[str, Found]:
    """Differences by group and case; see tests/support/quantize_interpreted.py."""
    found: dict[str, Found] = subprocesses.interpreted("quantize_interpreted.py", *groups)
    return found


FAST = "some", "layouts", "ties", "sums"  # in one process


def wrong(found: Found) -> Found:
    """Cases that are not as they must be: the specification's bytes and numbers; where blocks are rotated, sums in
    another order may move a number that lies between two levels, and the scale's last bit."""
    bad = {}
    for case, about in found.items():
        if "hadamard" in case and "bytes" in about:
            fine = about["codes"] <= 1e-4 and about["code step"] <= 1 and about["scale step"] <= 1
            about = {name: about[name] for name in ("rest", "outside")} | {"rotated": 0 if fine else about["codes"]}
        else:
            about = {name: about[name] for name in ("bytes", "numbers", "rest", "outside") if name in about}
        if any(about.values()):
            bad[case] = found[case]
    return bad


@pytest.mark.parametrize("format", FORMATS)
def test_kernels_are_their_specification(format: str) -> None:
    """Every dtype; one number, and rows that fill a tile and go on; zeros, ±max, denormals, inf and NaN among them."""
    found = {case: about for case, about in interpreted(*FAST)["some"].items() if case.startswith(f"{format} ")}
    assert len(found) == 8
    assert wrong(found) == {}


@pytest.mark.slow
def test_kernels_are_their_specification_in_all_blocks() -> None:
    found = interpreted("others")["others"]
    assert len(found) == 7 * 16 + 6 * 24 + 2 * 12  # fp8 is never dithered
    assert wrong(found) == {}


def test_rows_are_reordered_on_the_way() -> None:
    found = interpreted(*FAST)["layouts"]
    assert len(found) == 2 * 3 * 2
    assert wrong(found) == {}


def test_ties_are_those_of_the_specification() -> None:
    found = interpreted(*FAST)["ties"]
    assert len(found) == 2
    assert wrong(found) == {}


def test_sums_of_payloads_are_their_specification() -> None:
    """The sum over senders and the sum sent on, with one's own part exact: bit by bit where nothing is rotated."""
    found = interpreted(*FAST)["sums"]
    assert len(found) == 10
    for case, about in found.items():
        rotated = "hadamard" in case.split()[0]
        assert (about["NaN"], about["rest"]) == (0, 0), case
        assert about["error"] < 1e-5, case
        if "hadamard" in case:
            assert about["codes"] <= 1e-4, (case, about)
            assert (about["code step"], about["scale step"]) <= (1, 1), (case, about)
        else:
            assert about["bytes"] == 0, (case, about)
        assert rotated or about["numbers"] == 0, (case, about)


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):  # type: ignore[no-untyped-def]
    """The module that compiles what a launch would."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from benchmarks.kernels import quantize_code

    return quantize_code


ROTATION = 64  # bytes that a thread reads of a block's signs, four at a time


def check(compiled: Any, loads: float, stores: float, narrow: int = 16, rotation: int = 0) -> None:
    """Nothing spilled; numbers and codes, `loads` and `stores` bytes of a thread, move 16 bytes at a time (codes of
    three bits `narrow`); beside them there are only scales, of two bytes, and the rotation's small matrices and signs.
    Denormal numbers are not taken for zeros: the bits of a dithered offset are one."""
    assert re.findall(r"\b(?:add|sub|mul|fma)\.[\w.]*ftz", compiled.ptx) == []
    assert (compiled.stack, compiled.local) == (0, 0)
    for access, moved in (("LDG", loads), ("STG", stores)):
        widths = compiled.widths(access)
        assert sum(width * count for width, count in widths.items() if width >= narrow) >= moved, (access, widths)
        small = sum(width * count for width, count in widths.items() if width < narrow)
        assert small <= 24 + (rotation if access == "LDG" else 0), (access, widths)


def check_rows(code: Any, format: str, dtype: torch.dtype, capability: int, seed: int | None) -> None:
    bits, count = parse_format(format).bits, code.elements(format)
    numbers, codes, narrow = count * dtype.itemsize, count * bits / 8, 8 if bits == 3 else 16
    rotation = ROTATION * format.endswith("hadamard")
    quantizing = code.quantizing(format, dtype, capability, seed)
    check(quantizing, numbers, codes, narrow, rotation)
    dequantizing = code.dequantizing(format, dtype, capability, seed)
    check(dequantizing, codes, numbers, narrow, rotation)
    # the interpreter's largest number of a pair is NaN if one is; a GPU's only where it is told to
    kernels = [dequantizing] if seed is not None else [dequantizing, quantizing]
    for kernel in kernels:
        assert re.findall(r"\b(?:min|max)\.(?!NaN)[\w.]*f32", kernel.ptx) == []
    assert re.findall(r"\bmin\.NaN[\w.]*f32", dequantizing.ptx)
    # every number is rounded to nearest, in tiles without masks and in those with
    if dtype == torch.bfloat16:
        pairs, single = (dequantizing.ptx.count(f"cvt.rn.{kind}.f32") for kind in ("bf16x2", "bf16"))
        assert 2 * pairs + single == 2 * count


@pytest.mark.parametrize(
    "capability", [pytest.param(80, marks=pytest.mark.slow), 90, pytest.param(100, marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_compiled_kernels_move_whole_vectors_and_spill_nothing(code: Any, capability: int) -> None:
    for format in ("int8", "fp8", "int4"):
        check_rows(code, format, torch.bfloat16, capability, None)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("format", FORMATS)
def test_every_compiled_kernel(code: Any, format: str, capability: int) -> None:
    count, bits = code.elements(format), parse_format(format).bits
    narrow = 8 if bits == 3 else 16
    for dtype, seed in ((torch.bfloat16, None if format == "fp8" else 1), (torch.float32, None)):
        check_rows(code, format, dtype, capability, seed)
        numbers, rotation = count * dtype.itemsize, ROTATION * format.endswith("hadamard")
        check(code.reducing(format, dtype, capability, seed), numbers + count * bits / 8, numbers, narrow, rotation)
    count = code.elements("int8", format)
    check(code.requantizing("int8", format, torch.bfloat16, capability), count * 3, count * bits / 8, narrow, rotation)


def test_no_seed_or_length_is_a_constant_of_a_kernel(code: Any) -> None:
    """Otherwise something would be compiled at every step of training."""
    from rewriter.kernels import quantize_triton

    for name in code.KERNELS:
        kernel = getattr(quantize_triton, name)
        free = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
        assert free == {"n", "tiles", "seed", "to_seed", "senders", "skip"} & set(kernel.arg_names)


class ComputedOn(TorchDispatchMode):
    """Which operators had an argument on a device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.found = device, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(x, torch.Tensor) and x.device.type == self.device for x in args):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_constants_are_copied_to_their_device_when_they_are_done() -> None:
    """A kernel that makes them runs on one stream, and a user on another one would not wait for it."""
    from rewriter.kernels import blocks, quantize_triton

    format, device = parse_format("int3-hadamard"), torch.device("meta")
    tile = quantize_triton.tile_of(format)
    with ComputedOn("meta") as mode:
        made = [
            quantize_triton._matrices(tile, torch.bfloat16, device),
            quantize_triton._matrix_and_signs(tile, torch.bfloat16, device),
            quantize_triton._indices((1, 0), 2, device),
            blocks.hadamard(64, device),
            blocks.signs(64, device),
            blocks._table(format, device),
        ]
        assert mode.found == []
        assert all(x is not None and x.is_meta for x in made)
        _ = blocks.signs(64, device) + 1
        assert mode.found == ["aten.add.Tensor"]

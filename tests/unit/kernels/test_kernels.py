"""Triton kernels against their specifications: in the interpreter, and compiled for GPUs that are not here."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import subprocesses
import torch
from repository import ROOT

from rewriter.kernels import merge

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="Triton exists for Linux only")


@cache
def interpreted() -> Any:
    """Errors of "merged" and "dequantized" by case; see tests/support/kernels_interpreted.py."""
    return subprocesses.interpreted("kernels_interpreted.py", timeout=300)


@on_linux
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_the_kernel_is_exact_in_any_shape(dtype: str) -> None:
    """Odd sizes, up to five parts, rows that some or all parts saw nothing of: only the last rounding is left."""
    cases = {case: error for case, error in interpreted()["merged"].items() if case.startswith(dtype)}
    assert len(cases) == 20
    assert {case: error for case, error in cases.items() if not error < 1e-6} == {}


@on_linux
@pytest.mark.parametrize(
    "case",
    ["mixed dtypes, a stride, parts in a message", "a part whose rows are not contiguous", "nothing beyond the end"],
)
def test_the_kernel_reads_any_layout(case: str) -> None:
    assert interpreted()["merged"][case] < 1e-6


@on_linux
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(("parts", "size"), [(2, 64), (8, 128)])
@pytest.mark.slow
def test_compiled_code_moves_whole_vectors_and_spills_nothing(
    capability: int, parts: int, size: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without a GPU: 16 bytes per load and store, bf16 rounded to nearest, all in registers."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from benchmarks.kernels.merge_code import compiled
    from rewriter.kernels.merge_triton import BLOCK, WARPS

    code = compiled(parts, size, capability)
    assert f".target sm_{capability}" in code.ptx
    each = BLOCK // (32 * WARPS) // 8  # vectors of 8 bf16 per thread
    assert (code.loads, code.stores) == (each * parts, each)
    assert code.ptx.count("cvt.rn.bf16x2.f32") == each * 4
    assert (code.stack, code.local) == (0, 0)
    assert 16 <= code.registers <= 128


def test_merging_needs_no_triton() -> None:
    """Elsewhere than on CUDA it is not even imported: there is none for macOS and Windows."""
    script = "import sys; sys.modules['triton'] = None; import rewriter.kernels, rewriter.runtime; print('fine')"
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.stdout == "fine\n", ran.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_merged_parts_are_rounded_once(dtype: torch.dtype) -> None:
    """To the dtype that is asked for; log-sum-exps stay in the accumulation dtype."""
    made = [(torch.randn(2, 3, 5, 4).bfloat16(), torch.randn(2, 3, 5)) for _ in range(3)]
    o, lse = merge(made, dtype=dtype)
    exact, sums = merge([(o.double(), lse.double()) for o, lse in made])
    assert (o.dtype, lse.dtype, exact.dtype) == (dtype, torch.float32, torch.float64)
    torch.testing.assert_close(o.double(), exact, rtol=torch.finfo(dtype).eps / 2 + 1e-6, atol=1e-6)
    torch.testing.assert_close(lse.double(), sums, rtol=1e-6, atol=1e-6)
    assert merge(made)[0].dtype == torch.float32


@on_linux
def test_dequantizing_kernels_are_exact() -> None:
    """FP8 in blocks that do not divide the weight, per row and per tensor; every code; MXFP4; scales as exponents."""
    found = interpreted()["dequantized"]
    assert len(found) == 35
    assert {case: error for case, error in found.items() if error} == {}

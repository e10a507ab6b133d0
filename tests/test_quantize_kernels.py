"""The kernels of quantized messages against their specification in Triton's interpreter, and what they compile to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
Found = dict[str, dict[str, float]]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton exists for Linux only")


@cache
def interpreted(group: str) -> Found:
    """What differs, by case; see tests/quantize_interpreted.py."""
    settings = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    script = str(ROOT / "tests" / "quantize_interpreted.py")
    ran = subprocess.run([sys.executable, script, group], env=settings, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    found: Found = json.loads(ran.stdout)
    return found


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


@pytest.mark.parametrize("format", ["int8", "int6", "int4", "int2", "int4-hadamard", "int3-hadamard", "int2-hadamard"])
def test_kernels_are_their_specification(format: str) -> None:
    """Every dtype; one number, and rows that fill a tile and go on; zeros, ±max, denormals, inf and NaN among them."""
    found = {case: about for case, about in interpreted("some").items() if case.startswith(f"{format} ")}
    assert len(found) == 12
    assert wrong(found) == {}


@pytest.mark.slow
def test_kernels_are_their_specification_in_all_blocks() -> None:
    found = interpreted("others")
    assert len(found) == 7 * 12 + 6 * 24
    assert wrong(found) == {}


def test_rows_are_reordered_on_the_way() -> None:
    found = interpreted("layouts")
    assert len(found) == 2 * 3 * 2
    assert wrong(found) == {}

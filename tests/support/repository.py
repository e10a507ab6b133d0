"""Folders of this repository that tests read."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
BENCHMARKS = ROOT / "benchmarks"
TINY_LLAMA = ROOT / "examples" / "tiny-llama"  # the model that ships

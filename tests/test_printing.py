"""The printed IR: golden texts to learn from, equal in every process. REWRITER_GOLDEN=1 writes the files anew."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import programs
import pytest
import transformers

from rewriter.ir import Program
from rewriter.recipes import Recipe
from rewriter.recipes.apply import apply_recipe

GOLDEN = Path(__file__).parent / "golden"


CASES = [
    "llama-traced", "llama-ladder-upper-half-tp2", "gpt_neox-ladder-tp2", "llama-attention2d-sp4",
    "llama-ladder-sp2-tp2", "llama-ladder-int8-tp2",
]  # fmt: skip


def shown(case: str) -> Program:
    if case == "llama-traced":
        return programs.traced("llama")
    if case == "llama-ladder-upper-half-tp2":
        return programs.program("llama", {2, 3}, tp=2)
    if case == "llama-attention2d-sp4":
        return apply_recipe(programs.traced("llama"), _sharing([1, 2, 2]), sp=4)[0]
    if case == "llama-ladder-sp2-tp2":
        return apply_recipe(programs.traced("llama"), _sharing([1, 2, 1], {"pass": "ladder"}), tp=2, sp=2)[0]
    if case == "llama-ladder-int8-tp2":
        return apply_recipe(programs.traced("llama"), Recipe.load("ladder-int8"), tp=2)[0]
    return programs.program("gpt_neox", range(4), tp=2)


def _sharing(grid: list[int], *rewrites: dict[str, str]) -> Recipe:
    """Tensor parallelism, `rewrites`, and tokens over a grid of ranks."""
    tokens = {"pass": "sequence_parallel", "kind": "attention2d", "grid": grid}
    passes = [{"pass": "tensor_parallel"}, *rewrites, tokens, {"pass": "overlap"}]
    return Recipe.model_validate({"name": "shown", "summary": "one", "paper": "none", "passes": passes})


# The files show what the pinned transformers computes; other versions write the same function differently.
PINNED = re.search(r"^transformers==(\S+)", (GOLDEN.parents[1] / "constraints.txt").read_text(), re.MULTILINE).group(1)


@pytest.mark.skipif(transformers.__version__ != PINNED, reason=f"golden texts are those of transformers {PINNED}")
@pytest.mark.parametrize("case", CASES)
def test_printed_ir_is_the_golden_one(case: str) -> None:
    file = GOLDEN / f"{case}.txt"
    text = shown(case).text()
    if os.environ.get("REWRITER_GOLDEN") == "1":
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), (
        f"printed IR changed; REWRITER_GOLDEN=1 pytest {__file__} rewrites it"
    )


@pytest.mark.slow
def test_text_and_fingerprint_do_not_depend_on_the_process() -> None:
    code = "import programs; p = programs.program('llama', {2, 3}, tp=2); print(p.fingerprint())"
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
    assert found == {programs.program("llama", {2, 3}, tp=2).fingerprint() + "\n"}


def test_layers_that_differ_are_not_folded() -> None:
    text = programs.traced("llama").text()
    assert "layers i = 1–3 ×3 {" in text
    assert "layers i" not in programs.traced("llama").text(full=True)
    windows = programs.traced("gemma3_text").text()
    assert "mask=window" in windows
    assert "mask=causal" in windows
    assert "Gemma3Attention.2" in windows


def test_the_fingerprint_sees_wiring_shapes_and_constants() -> None:
    plain = programs.traced("llama")
    prints = {
        p.fingerprint()
        for p in (
            plain,
            programs.program("llama", tp=2),
            programs.program("llama", {2}, tp=2),
            programs.traced("qwen2"),
        )
    }
    assert len(prints) == 4


def test_html_escapes_what_the_model_says() -> None:
    program = programs.traced("llama")
    source = replace(program.source, architecture="<script>alert(1)</script>")
    page = program.with_(source=source)._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "<details open><summary>wiring</summary>" in page

"""The printed IR: golden texts to learn from, equal in every process. REWRITER_GOLDEN=1 writes the files anew."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import programs
import pytest
import transformers
import zoo
from repository import ROOT, TESTS

from rewriter.explain.inspection import inspect
from rewriter.ir import Program
from rewriter.recipes import Recipe
from rewriter.recipes.apply import apply_recipe
from rewriter.recipes.catalogue import library

GOLDEN = TESTS / "golden"


WHOLE = [
    "llama-traced", "llama-ladder-upper-half-tp2", "gpt_neox-ladder-tp2", "llama-attention2d-sp4",
    "llama-ladder-sp2-tp2", "llama-ladder-int8-tp2",
]  # fmt: skip

LADDER, OWN_PARTIAL = ("ladder", {}), ("ladder", {"variant": "own_partial"})
DESYNC, PARALLEL = ("desync", {"n": 2, "resync": "sum"}), ("parallel_block", {})
STANDARD = None

# What the lower and the upper half of a small Llama are: the files show the wiring where they meet.
TRANSITIONS = {
    "standard-to-ladder": (STANDARD, LADDER),
    "ladder-to-standard": (LADDER, STANDARD),
    "ladder-to-own-partial": (LADDER, OWN_PARTIAL),
    "ladder-to-desync": (LADDER, DESYNC),
    "ladder-to-parallel": (LADDER, PARALLEL),
    "own-partial-to-standard": (OWN_PARTIAL, STANDARD),
    "own-partial-to-ladder": (OWN_PARTIAL, LADDER),
    "own-partial-to-desync": (OWN_PARTIAL, DESYNC),
    "own-partial-to-parallel": (OWN_PARTIAL, PARALLEL),
    "standard-to-own-partial": (STANDARD, OWN_PARTIAL),
    "standard-to-desync": (STANDARD, DESYNC),
    "desync-to-standard": (DESYNC, STANDARD),
    "desync-to-ladder": (DESYNC, LADDER),
    "desync-to-own-partial": (DESYNC, OWN_PARTIAL),
    "desync-to-parallel": (DESYNC, PARALLEL),
    "parallel-to-standard": (PARALLEL, STANDARD),
    "parallel-to-ladder": (PARALLEL, LADDER),
    "parallel-to-own-partial": (PARALLEL, OWN_PARTIAL),
    "parallel-to-desync": (PARALLEL, DESYNC),
    "standard-to-parallel": (STANDARD, PARALLEL),
}

# Passes whose work no file above shows, on a small Llama over two ranks: the passes after tensor_parallel.
ALONE = {
    "tensor-parallel": [],
    "desync-4x-mean": [("desync", {"n": 4})],
    "drop-sync": [("drop_sync", {"layers": [1, 3]})],
    "merge-and-fuse": [PARALLEL, ("merge_reductions", {}), ("fuse_projections", {})],
    "no-communication": [("no_communication", {})],
    "overlapped-parallel": [PARALLEL, ("merge_reductions", {}), ("overlap", {})],
    "ladder-in-two-branches": [LADDER, ("overlap", {"branches": 2})],
}


def rewritten(*passes: tuple[str, dict[str, Any]]) -> Program:
    """A small Llama after `passes`, on two ranks."""
    return programs.applied(programs.traced("llama").with_(mesh={"tp": 2}), *passes)


def transition(case: str) -> Program:
    """The two halves in the order in which passes have to come: parallel blocks are numbered anew."""
    halves = zip(TRANSITIONS[case], ([0, 1], [2, 3]), strict=True)
    chosen = [(half[0], {**half[1], "layers": layers}) for half, layers in halves if half is not None]
    return rewritten(("tensor_parallel", {}), *sorted(chosen, key=lambda entry: entry[0] != "parallel_block"))


def text_of(case: str) -> str:
    if case in WHOLE:
        return shown(case).text()
    if case == "fit-ranks":  # eight query heads on two groups, for three ranks
        ranks = programs.traced("llama").with_(mesh={"tp": 3})
        return programs.applied(ranks, ("fit_ranks", {"waste": 1.0}), ("tensor_parallel", {})).text()
    if case == "permute":
        return rewritten(("permute", {"round_robin": 2}), ("tensor_parallel", {})).text()
    if case == "merge-and-fuse":
        return rewritten(("tensor_parallel", {}), *ALONE[case]).text()
    program = transition(case) if case in TRANSITIONS else rewritten(("tensor_parallel", {}), *ALONE[case])
    sections = program.text().split("\n\n")
    return "\n\n".join([*sections[:2], sections[-1]])  # without bodies and parameters, which are those of WHOLE


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
@pytest.mark.parametrize("case", [*WHOLE, *TRANSITIONS, *ALONE, "permute", "fit-ranks"])
def test_printed_ir_is_the_golden_one(case: str) -> None:
    file = GOLDEN / f"{case}.txt"
    text = text_of(case)
    if os.environ.get("REWRITER_GOLDEN") == "1":
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), (
        f"printed IR changed; REWRITER_GOLDEN=1 pytest {__file__} rewrites it"
    )


def test_every_pass_has_a_golden_file() -> None:
    """By the last section of the files, the history of passes."""
    histories = [file.read_text(encoding="utf-8").rpartition("\nhistory\n")[2] for file in GOLDEN.glob("*.txt")]
    assert set(re.findall(r"^  (\w+)\(", "".join(histories), re.MULTILINE)) == set(programs.PASSES)
    assert {file.stem for file in GOLDEN.glob("*.txt")} == {*WHOLE, *TRANSITIONS, *ALONE, "permute", "fit-ranks"}


SHARES_TOKENS = {"attention2d", "long-context", "ring-attention", "ulysses"}


@pytest.mark.skipif(transformers.__version__ != PINNED, reason=f"golden texts are those of transformers {PINNED}")
@pytest.mark.parametrize("recipe", sorted(library()))
def test_the_plan_of_a_recipe_is_the_golden_one(recipe: str) -> None:
    file = GOLDEN / "plans" / f"{recipe}.txt"
    ranks = {"sp": 4} if recipe in SHARES_TOKENS else {"tp": 3 if recipe == "fit-tp" else 2}
    config = zoo.config("llama")
    config.num_hidden_layers = 22 if recipe == "ladder-last-20" else 4
    text = inspect(config, recipe, **ranks).plan
    if os.environ.get("REWRITER_GOLDEN") == "1":
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), f"REWRITER_GOLDEN=1 pytest {__file__} rewrites it"


EMIT = """
import sys
import rewriter as rw
program = rw.rewrite(rw.trace(sys.argv[1]), "ladder-upper-half", tp=2)
print(*set(program.source.config["layer_types"]))
print(program.text(full=True))
rw.save(program, sys.argv[2], options=rw.SaveOptions(verify="none"))
"""


@pytest.mark.slow
def test_text_and_emitted_files_do_not_depend_on_the_process(tmp_path: Path) -> None:
    """Gemma 3 calls its rotary embedding once per type of layer, in the order of a `set` of strings."""
    zoo.save("gemma3_text", tmp_path / "source")
    paths = os.pathsep.join([str(TESTS), str(ROOT)])
    running = [
        subprocess.Popen(
            [sys.executable, "-c", EMIT, str(tmp_path / "source"), str(tmp_path / seed / "out")],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("0", "1")
    ]
    (order, text), (other, again) = (process.communicate()[0].split("\n", 1) for process in running)
    assert order != other
    assert "rotary_emb#1" in text
    assert text == again
    files, others = (
        {str(f.relative_to(tmp_path / seed)): f.read_bytes() for f in (tmp_path / seed).rglob("*") if f.is_file()}
        for seed in ("0", "1")
    )
    assert sum(name.endswith(".py") for name in files) >= 2
    assert files == others


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

"""What ranks hold as ranges of the adapted checkpoint: the same bits, few bytes, and refused where it was changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import rewriter as rw
from rewriter.common.errors import RewriterError
from rewriter.ir import Program
from rewriter.passes.permute import Permute
from rewriter.passes.tensor_parallel import TensorParallel
from rewriter.weights import Checkpoint
from rewriter.weights.expressions import Concat, Expression, Reference, Slice, Stack, Take, Tensor, Transpose
from rewriter.weights.references import RankWeights, decoded, encoded, references_text

RECIPES = {
    "llama": ["desync-2x-sum"],
    "gpt2": ["desync-2x-sum"],  # Conv1D, and three projections in one tensor
    "gpt_neox": ["ladder-own-partial"],  # queries, keys and values of each head in one tensor
    "mixtral": ["tensor-parallel"],  # experts stored one by one
}


def source(family: str, tmp_path: Path) -> Path:
    zoo.save(family, tmp_path / family)
    return tmp_path / family


def saved(program: Program, out: Path, **options: Any) -> Path:
    rw.save(program, out, options=rw.SaveOptions(verify="none", **options))
    return out


def held(out: Path, rank: int, mesh: str = "tp2") -> dict[str, torch.Tensor]:
    weights = RankWeights.open(out, out / "runtime" / mesh / "weights.json", rank)
    return weights.read(dict.fromkeys(weights.parameters), "cpu")


@pytest.mark.parametrize(("family", "recipe"), [(f, r) for f, recipes in RECIPES.items() for r in recipes])
@pytest.mark.fast("llama-desync-2x-sum", "gpt2-desync-2x-sum")
def test_ranks_hold_what_the_program_says(family: str, recipe: str, tmp_path: Path) -> None:
    path = source(family, tmp_path)
    program = rw.rewrite(rw.trace(path), recipe, tp=2)
    out = saved(program, tmp_path / "out")
    original = Checkpoint.open(path)
    for rank in range(2):
        found = held(out, rank)
        assert found.keys() == program.parameters.keys()
        for name, spec in program.parameters.items():
            assert torch.equal(found[name], original.evaluate(spec.on_rank(rank))), name
            assert found[name].is_contiguous()


def test_a_permuted_checkpoint_is_read_in_its_own_order(tmp_path: Path) -> None:
    """No gather by index where the adapted checkpoint already stores the order that the ranks hold."""
    order = {"model.layers.1.self_attn": "10", "model.layers.1.mlp": "10" * 56}
    traced = rw.trace(source("llama", tmp_path)).with_(mesh={"tp": 2})
    program = TensorParallel().apply(Permute(order).apply(traced))
    out = saved(program, tmp_path / "out")
    assert '"take"' not in (out / "runtime/tp2/weights.json").read_text()


def test_materialized_files_hold_the_same(tmp_path: Path) -> None:
    program = rw.rewrite(rw.trace(source("llama", tmp_path)), "ladder", tp=2)
    references = saved(program, tmp_path / "references", dtype="bf16")
    files = saved(program, tmp_path / "files", dtype="bf16", materialize=True)
    assert not list(references.rglob("rank-*"))
    for rank in range(2):
        stored = load_file(files / f"runtime/tp2/rank-{rank}.tensors")
        found = held(references, rank)
        assert found.keys() == stored.keys()
        assert all(torch.equal(found[name], stored[name]) for name in stored)


def test_an_output_takes_little_more_than_its_source(tmp_path: Path) -> None:
    path = source("llama", tmp_path)
    program = rw.rewrite(rw.trace(path), "tensor-parallel", tp=4)
    linked = saved(program, tmp_path / "linked", link=True)
    assert (linked / "model.safetensors").samefile(path / "model.safetensors")
    written = [f for f in linked.rglob("*") if f.is_file() and f.stat().st_nlink == 1]
    assert sum(f.stat().st_size for f in written) < 100_000


def replaced(out: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(out / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def edited(out: Path, change: Callable[[Any], Any]) -> None:
    path = out / "runtime/tp2/weights.json"
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))


NORM = "model.norm.weight"
CHANGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another size": (
        lambda out: replaced(out, lambda t: t.update(more=torch.ones(1))),
        r"model\.safetensors: changed since `rewrite` wrote .* it has \d+ bytes, not \d+",
    ),
    "another layout": (
        lambda out: replaced(out, lambda t: t.update({"model.norm.weighT": t.pop(NORM)})),
        r"model\.safetensors: changed since `rewrite` wrote .* its header is another",
    ),
    "no file": (lambda out: (out / "model.safetensors").unlink(), r"model\.safetensors: no such file, but weights"),
    "a cut file": (
        lambda out: (out / "model.safetensors").write_bytes((out / "model.safetensors").read_bytes()[:-4]),
        "not a valid safetensors file",
    ),
    "outside": (
        lambda out: edited(out, lambda t: t["files"].update({"../x.safetensors": {"size": 1, "header": ""}})),
        "outside the directory",
    ),
    "a name too long": (
        lambda out: edited(out, lambda t: t["files"].update({"x" * 300: {"size": 1, "header": ""}})),
        "no such file, but weights",
    ),
    "no JSON": (lambda out: (out / "runtime/tp2/weights.json").write_text("{"), "its JSON cannot be read"),
    "another schema": (lambda out: edited(out, lambda t: t.update(schema=9)), "schema 9, this version reads 1"),
    "no expression": (
        lambda out: edited(out, lambda t: t["parameters"].update({NORM: [["fold", NORM, 1], None, None]})),
        r"not as `rewrite` wrote it \(at 'fold'\)",
    ),
    "one rank only": (
        lambda out: edited(out, lambda t: t["parameters"].update({NORM: [NORM, 0, [[[0, 4]]]]})),
        "not as `rewrite` wrote it",
    ),
    "a range beyond": (
        lambda out: edited(out, lambda t: t["parameters"].update({NORM: [NORM, 0, [[[0, 4]], [[4, 9999]]]]})),
        r"range \[4, 9999\) does not lie in dimension 0",
    ),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("references")
    return saved(rw.rewrite(rw.trace(source("llama", root)), "ladder", tp=2), root / "out")


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_is_refused_by_name(change: str, written: Path, tmp_path: Path) -> None:
    out = tmp_path / "copy"
    shutil.copytree(written, out)
    apply, message = CHANGES[change]
    apply(out)
    with pytest.raises(RewriterError, match=message):
        held(out, 1)


NUMBERS = st.integers(0, 9)
EXPRESSIONS: st.SearchStrategy[Expression] = st.recursive(
    st.builds(Tensor, st.text(max_size=3)),
    lambda inner: st.one_of(
        st.builds(Slice, inner, NUMBERS, st.lists(st.tuples(NUMBERS, NUMBERS), max_size=2).map(tuple)),
        st.builds(Concat, st.lists(inner, max_size=3).map(tuple), NUMBERS),
        st.builds(Stack, st.lists(inner, max_size=3).map(tuple), NUMBERS),
        st.builds(Transpose, inner, NUMBERS, NUMBERS),
        st.builds(Take, inner, NUMBERS, st.lists(NUMBERS, max_size=3).map(tuple)),
    ),
    max_leaves=6,
)


@given(expression=EXPRESSIONS)
def test_every_expression_survives_the_file(expression: Expression) -> None:
    assert decoded(json.loads(json.dumps(encoded(expression)))) == expression


def test_a_reference_that_does_not_fit_is_not_written(written: Path) -> None:
    wrong = Reference(Slice(Tensor(NORM), 0, ((0, 9999),)))
    with pytest.raises(RewriterError, match=r"norm: .*range \[0, 9999\)"):
        references_text({"norm": wrong}, Checkpoint.open(written))

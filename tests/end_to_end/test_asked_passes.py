"""Verification is of what the recipe asks for, not of what a pass recorded of itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import programs
import pytest
import zoo

from rewriter import api
from rewriter.check import asked_passes as asked_passes_module
from rewriter.check.asked_passes import asked_passes
from rewriter.common.errors import RewriterError, VerificationError
from rewriter.ir import PassRecord, Program
from rewriter.ir.marks import mark
from rewriter.passes.desync import Desync
from rewriter.passes.ladder import Ladder
from rewriter.recipes import Recipe, catalogue
from rewriter.recipes.apply import apply_recipe

Apply = Callable[[Any, Program], Program]
right = Ladder.apply


def recorded_as(program: Program, rewrite: Any) -> Program:
    """`program`, whose last entry says that `rewrite` was applied."""
    return program.with_(history=(*program.history[:-1], replace(program.history[-1], rewrite=rewrite)))


def all_layers(asked: Any, program: Program) -> Program:
    """Rewrites all layers, and says so."""
    return right(replace(asked, layers="all"), program)


def all_layers_secretly(asked: Any, program: Program) -> Program:
    """Rewrites all layers, and records those that were asked for."""
    return recorded_as(all_layers(asked, program), asked)


def all_layers_unmarked(asked: Any, program: Program) -> Program:
    """The same, and no mark of the wiring tells."""
    wired = all_layers_secretly(asked, program)
    graph, _ = wired.edit()
    for node in graph.nodes:
        mark(node, mode=None)
    return wired.with_(graph=graph)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "llama"
    zoo.save("llama", directory)
    return directory


LAYERS = "ladder: asked for layers 2–3, but layers 0–3 were rewritten. It is a fault of the pass"
NUMBERS = r"rewritten = its reference: worst at row \d, token \d+"


@pytest.mark.parametrize(
    ("fault", "message"),
    [(all_layers, LAYERS), (all_layers_secretly, LAYERS), (all_layers_unmarked, NUMBERS)],
)
def test_a_pass_that_rewrites_other_layers_than_asked_is_found(
    fault: Apply, message: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ladder, "apply", fault)
    with pytest.raises(VerificationError, match=message):
        api.convert(source, "ladder-upper-half", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_reference_is_of_the_recipe_even_where_records_are_not_compared(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ladder, "apply", all_layers)
    for check in ("_check_record", "_check_wiring"):
        monkeypatch.setattr(asked_passes_module, check, lambda *_: None)
    with pytest.raises(VerificationError, match=NUMBERS):
        api.convert(source, "ladder-upper-half", out=tmp_path / "out")


def after(recipe: str | Sequence[dict[str, Any]], **ranks: int) -> Program:
    """Llama after a shipped recipe or a list of passes."""
    if isinstance(recipe, str):
        loaded = Recipe.load(recipe)
    else:
        loaded = Recipe.model_validate({"name": "mixed", "summary": "-", "paper": "-", "passes": recipe})
    return apply_recipe(programs.traced("llama"), loaded, **ranks)[0]


def entry_of(program: Program, name: str) -> PassRecord:
    return next(entry for entry in program.history if entry.name == name)


def test_any_other_option_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    wired = Desync.apply
    monkeypatch.setattr(Desync, "apply", lambda self, program: wired(replace(self, resync="sum"), program))
    with pytest.raises(VerificationError, match="desync: asked for resync='mean', but resync='sum' is recorded"):
        asked_passes(after("desync-2x", tp=2))


def test_a_pass_that_records_nothing_or_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ladder, "apply", lambda self, program: program)
    with pytest.raises(VerificationError, match="pass ladder, but pass fuse_projections is recorded in its place"):
        asked_passes(after("ladder", tp=2))
    monkeypatch.setattr(Ladder, "apply", lambda self, program: right(self, right(replace(self, layers=[1]), program)))
    with pytest.raises(VerificationError, match="ladder: asked for layers 2–3, but layers 1 were"):
        asked_passes(after([{"pass": "ladder", "layers": "upper-half"}]))


def test_every_shipped_recipe_is_recorded_as_it_is_asked_for() -> None:
    count = 0
    for name in catalogue.library():
        for axes in ({"tp": 2}, {"tp": 2, "sp": 2}):
            try:
                program = apply_recipe(programs.traced("llama"), Recipe.load(name), **axes)[0]
            except RewriterError:  # not on such ranks, not without a measurement, not on so few layers
                continue
            assert asked_passes(program) == [entry.rewrite for entry in program.history]
            count += 1
    assert count >= 15


def test_several_passes_may_share_the_layers_out() -> None:
    ladder, desync = {"pass": "ladder", "layers": "1"}, {"pass": "desync", "layers": [2, 3], "n": 2, "resync": "sum"}
    quantized = {"pass": "quantize_collectives", "format": "int8"}
    program = after([{"pass": "tensor_parallel"}, ladder, desync, quantized], tp=2)
    assert [p.name for p in asked_passes(program)] == [e.name for e in program.history]
    mistaken = program.with_(asked=tuple(replace(p, layers=[3]) if p.name == "desync" else p for p in program.asked))
    with pytest.raises(VerificationError, match="desync: asked for layers 3, but layers 2–3 were rewritten"):
        asked_passes(mistaken)


def test_the_same_layers_may_be_recorded_by_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ladder, "apply", lambda self, program: right(replace(self, layers=[2, 3]), program))
    program = after("ladder-upper-half", tp=2)
    assert entry_of(program, "ladder").options["layers"] == [2, 3]
    assert [p.layers for p in asked_passes(program) if p.name == "ladder"] == ["upper-half"]


def test_what_the_recipe_leaves_open_may_be_filled_in() -> None:
    program = after([{"pass": "tensor_parallel"}, {"pass": "sequence_parallel"}], tp=2, sp=2)
    planned = recorded_as(program, replace(program.history[-1].rewrite, kind="ring"))
    assert [p.name for p in asked_passes(planned)] == ["tensor_parallel", "sequence_parallel"]


def test_a_pass_that_was_left_out_is_not_asked_for() -> None:
    program = after([{"pass": "tensor_parallel"}, {"pass": "ladder", "layers": "40-50", "optional": True}], tp=2)
    assert [p.name for p in asked_passes(program)] == ["tensor_parallel"]


def test_passes_applied_by_hand_are_verified_as_they_are_recorded() -> None:
    program = programs.traced("llama")
    assert asked_passes(right(Ladder([1]), program)) == [Ladder([1])]
    with pytest.raises(VerificationError, match="ladder: asked for layers 1, but layers 0–3 were rewritten"):
        asked_passes(all_layers_secretly(Ladder([1]), program))

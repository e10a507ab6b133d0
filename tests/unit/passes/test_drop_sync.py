"""Dropping attention reductions where a measurement says that it costs least: the choice, the measurement, the flow."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo

import rewriter as rw
from rewriter.check import drift as drift_module
from rewriter.check.drift import calibration_tokens, drift
from rewriter.check.sensitivity import sensitivity
from rewriter.check.shrunken_check import check_shrunken
from rewriter.common.errors import RewriterError, VerificationError
from rewriter.convert import pass_measurements as calibrate_module
from rewriter.explain.inspection import inspect
from rewriter.ir import Program
from rewriter.ir.simulate import Simulator
from rewriter.passes.base import record
from rewriter.passes.desync import desynchronise
from rewriter.passes.drop_sync import DropSync, attention_reductions
from rewriter.passes.residual_rewrite import chosen_blocks
from rewriter.passes.tensor_parallel import TensorParallel
from rewriter.recipes.apply import apply_recipe
from rewriter.tracing import trace

OPTIONAL = rw.Recipe.load("drop-sync").with_overrides({"drop_sync.optional": "true"})
COSTS = (0.9, 0.1, 0.1, None, 0.3, 0.2)


def split(program: Program, ranks: int = 2) -> Program:
    return TensorParallel().apply(program.with_(mesh={"tp": ranks}, origin=program))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    directory = tmp_path_factory.mktemp("llama")
    zoo.save("llama", directory)
    return trace(directory)


# The choice


@pytest.mark.parametrize(
    ("drop", "layers"),
    [(1, (2,)), (2, (1, 2)), (3, (1, 2, 5)), (5, (0, 1, 2, 4, 5)), (0.5, (1, 2)), (0.39, (2,)), (1.0, (0, 1, 2, 4, 5))],
)
def test_the_cheapest_go_and_of_equal_ones_the_later(drop: float, layers: tuple[int, ...]) -> None:
    assert DropSync(drop, COSTS).chosen(6) == layers


def test_layers_that_are_given_need_no_measurement() -> None:
    assert DropSync(layers="upper-half").chosen(6) == (3, 4, 5)
    assert DropSync(layers="upper-half").request is None
    assert DropSync().request is not None


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"drop": 0}, "drop: 0; expected"),
        ({"drop": 1.5}, "drop: 1.5; expected"),
        ({"drop": float("nan")}, "drop: nan; expected"),
        ({"sensitivity": (-1.0,)}, "numbers from 0"),
        ({"sensitivity": (float("nan"),)}, "numbers from 0"),
        ({"sensitivity": (float("inf"),)}, "numbers from 0"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], part: str) -> None:
    with pytest.raises(RewriterError, match=part):
        DropSync(**options)


@pytest.mark.parametrize(
    ("rewrite", "part"),
    [
        (DropSync(), "there is no measurement. Convert a checkpoint"),
        (DropSync(sensitivity=(0.1, 0.2)), "sensitivity has 2 numbers, the model has 4 layers"),
        (DropSync(5, (0.1,) * 4), "drop=5 asks for 5 of 4"),
        (DropSync(0.1, (0.1,) * 4), "drop=0.1 asks for 0 of 4"),
        (DropSync(layers="last:9"), "last:9 asks for 9 layers"),
    ],
)
def test_a_choice_that_cannot_be_made_is_refused(rewrite: DropSync, part: str, program: Program) -> None:
    with pytest.raises(RewriterError, match=part):
        rewrite.apply(split(program))


def test_attention_without_a_reduction_of_its_own_cannot_wait() -> None:
    sharded = split(trace(zoo.config("gpt_neox")))
    assert attention_reductions(sharded) == {}
    with pytest.raises(RewriterError, match="drop_sync: layer 1 has no attention whose reduction could wait"):
        DropSync(layers=1).apply(sharded)


def test_one_rank_has_nothing_to_drop(program: Program) -> None:
    with pytest.raises(RewriterError, match="drop_sync is bound to a number of ranks, here 1: give --tp 2 or more"):
        rw.rewrite(program, "drop-sync")


# The measurement


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_layers_cost_is_the_drift_of_its_drop_alone(program: Program, ranks: int) -> None:
    tokens = zoo.batch(1, 300)[0]  # more than one window of the model's 192 positions
    measured = sensitivity(program, tokens, ranks)
    expected = [drift(program, DropSync(layers=layer).apply(split(program, ranks)), tokens).kl for layer in range(4)]
    assert measured == pytest.approx(expected, rel=1e-3)
    assert min(expected) > 0.01
    assert len(set(measured)) == 4


def test_measuring_takes_no_more_than_the_layers_after_each_drop(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each window every layer once, then for each drop its own layer rank by rank and what follows once."""
    computed: Counter[str] = Counter()
    leaf = Simulator._leaf

    def counting(self: Simulator, module: Any, path: str, inputs: Any) -> Any:
        computed[path] += 1
        return leaf(self, module, path, inputs)

    monkeypatch.setattr(Simulator, "_leaf", counting)
    sensitivity(program, zoo.batch(1, 300)[0], 2)
    assert computed["lm_head"] == 2 * (1 + 4)
    assert [computed[f"model.layers.{layer}.mlp.down_proj"] for layer in range(4)] == [4, 6, 8, 10]


def test_a_layer_without_such_a_reduction_has_no_cost(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = DropSync.apply

    def refusing(self: DropSync, sharded: Program) -> Program:
        if self.layers == 2:
            raise RewriterError("layer 2 reduces inside")
        return whole(self, sharded)

    monkeypatch.setattr(DropSync, "apply", refusing)
    measured = sensitivity(program, zoo.batch(1, 20)[0], 2)
    assert [cost is None for cost in measured] == [False, False, True, False]


def test_a_model_where_nothing_can_be_dropped_is_told(tmp_path: Path) -> None:
    zoo.save("gpt_neox", tmp_path)
    program = trace(tmp_path)
    reason = "drop_sync: in no layer can attention's reduction be dropped"
    with pytest.raises(RewriterError, match=reason):
        rw.rewrite(program, "drop-sync", tp=2)
    assert sensitivity(program, zoo.batch(1, 20)[0], 2) == (None,) * 4
    _, skipped = apply_recipe(program, calibrate_module.calibrate(OPTIONAL, program, 2), 2)
    assert any(name == "drop_sync" and why.startswith(reason) for name, why in skipped)


# From a recipe to a program


def test_a_recipe_without_sensitivity_is_measured(program: Program) -> None:
    tokens, what = calibration_tokens(program)
    costs = sensitivity(program, tokens, 2)
    rewritten = rw.rewrite(program, "drop-sync", tp=2)
    entry = next(e for e in rewritten.history if e.name == "drop_sync")
    assert entry.options["sensitivity"] == costs
    assert entry.options["measured_on"] == f"512 tokens on 2 ranks, {what}"
    cheapest = sorted(sorted(range(4), key=lambda layer: (costs[layer], -layer))[:2])
    assert f"in 2 of 4 layers: {cheapest[0]}, {cheapest[1]}" in entry.summary
    assert all(f"{layer}: {cost:.3g}" in entry.notes[0] for layer, cost in enumerate(costs) if cost is not None)
    [spec] = [p for p in rewritten.recipe["passes"] if p["pass"] == "drop_sync"]  # type: ignore[index]
    assert spec["sensitivity"] == list(costs)


def test_what_is_given_is_not_measured(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewriter.check.sensitivity.sensitivity", lambda *_, **__: pytest.fail("measured"))
    given = rw.rewrite(program, "drop-sync", tp=2, set={"drop_sync.sensitivity": [4, 1, 2, 3]})
    assert "layers: 1, 2" in given.history[2].summary
    rw.rewrite(program, "drop-sync", tp=2, set={"drop_sync.layers": "first:1"})
    rw.rewrite(program, "desync-2x", tp=2)


def test_a_config_alone_cannot_be_measured() -> None:
    """Inspection supposes equal costs and says so; applying the pass is refused."""
    with pytest.raises(RewriterError, match="measured on the weights, and there is no measurement"):
        DropSync(drop=2).apply(split(trace(zoo.config("llama"))))
    rules = inspect(zoo.config("llama"), "drop-sync", tp=2).data["rules"]
    assert any("measured on the weights; layers 2–3 stand for them here" in rule["reason"] for rule in rules)


def test_weights_that_do_not_fit_are_not_measured(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift_module, "available_memory", lambda: 1_000_000)
    with pytest.raises(
        RewriterError, match=r"chosen by a measurement, but the real weights were not run.* Give drop_sync"
    ):
        calibrate_module.calibrate(rw.Recipe.load("drop-sync"), program, 2)


# The shrunken check


def test_the_shrunken_check_drops_on_the_copy_what_is_dropped_on_the_model() -> None:
    config = zoo.config("llama")
    config.num_hidden_layers = 12
    costs = (9, 9, 9, 9, 1, 9, 9, 9, 2, 9, 9, 9)
    figures = check_shrunken(config, [TensorParallel(), DropSync(2, costs)], 2).figures()
    assert set(figures) == {
        "trace = original model",
        "rewritten = its reference",
        "2 simulated ranks = 2 ranks on 1 device",
    }


@dataclasses.dataclass(frozen=True)
class Faulty(DropSync):
    """drop_sync with one seeded fault."""

    fault: str = ""

    def apply(self, program: Program) -> Program:
        layers = self.chosen(program.source.num_layers)
        if self.fault == "another layer":
            layers = (layers[0] - 1, *layers[1:])
        attention = attention_reductions(program)
        kept = {b.index: b.index != attention[b.layer].index for b in chosen_blocks(program, self.name, layers)}
        if self.fault == "an MLP's reduction, too":
            kept[min(kept) + 1] = False
            kept |= {max(kept) + 1: True, max(kept) + 2: True}
        resync = "mean" if self.fault == "mean" else "sum"
        return record(desynchronise(program, kept, resync, self.name), DropSync(layers=list(layers)), self.fault)


@pytest.mark.parametrize("fault", ["", "another layer", "an MLP's reduction, too", "mean"])
@pytest.mark.fast("mean")
def test_a_seeded_fault_fails_the_shrunken_check(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(program: Program) -> Program:
        return program

    monkeypatch.setattr("rewriter.check.shrunken_check.single_device", faulty)
    monkeypatch.setattr(DropSync, "shrunken", lambda self, kept, count, plan=None: [self])
    passes = [TensorParallel(), Faulty(layers=[1], fault=fault)]
    if not fault:
        check_shrunken(zoo.config("llama"), passes, 2)
        return
    with pytest.raises(VerificationError, match=r"rewritten = its reference: worst at row \d, token \d+"):
        check_shrunken(zoo.config("llama"), passes, 2)


def test_gradients_reach_every_rank_after_a_drop(program: Program) -> None:
    """The simulation is one autograd graph: no parameter of a dropped layer is cut off."""
    from rewriter.ir.simulate import load_weights, simulate

    weights = {n: t.requires_grad_() for n, t in load_weights(program, torch.float32).items()}
    simulate(DropSync(layers="all").apply(split(program)), zoo.batch(), weights=weights).square().mean().backward()
    assert all(t.grad is not None and bool(t.grad.abs().sum() > 0) for t in weights.values())

"""Searching mixes: keys and recipes of mixes, the optimizer against all mixes, estimates, what is kept and refused."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import searched
from repository import TINY_LLAMA

from rewriter.common.errors import RewriterError
from rewriter.predict.search.choices import BY_NAME, FORMATS, REWRITES, Mix, PlacedRewrite, mix_of, recipe_of
from rewriter.predict.search.computed import WindowChange
from rewriter.predict.search.front import Costs, Option, agreement, front
from rewriter.predict.search.gains import Gains, gain_of
from rewriter.predict.search.measurements import Store
from rewriter.predict.search.result import recipe_with_measurements, rise_of
from rewriter.predict.search.run import Asked, search
from rewriter.predict.workload import Cluster, Workload
from rewriter.recipes import Recipe
from rewriter.tracing import trace


def asked(tp: int = 3, budget: float = 0.01, fabric: str = "pcie-gen4", text: str | None = None) -> Asked:
    return Asked(Workload(tp=tp, prompt=64, generate=16), Cluster(fabric), budget, text, windows=(2, 2))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return searched.save(tmp_path_factory.mktemp("searched"))


# --- mixes ---


def test_a_mix_is_found_again_by_its_key() -> None:
    mix = mix_of([PlacedRewrite(3, "drop"), PlacedRewrite(0, "ladder")], {2: "int8", 0: "int4-hadamard"}, "ulysses")
    assert searched.parse(mix.key) == mix
    assert mix.key == "ulysses ladder@0 drop@3 int4-hadamard@0 int8@2"
    assert searched.parse(Mix().key) == Mix()
    assert mix_of([p for part in mix.parts for p in part.placements], dict(mix.formats), "ulysses") == mix


def test_a_recipe_names_layers_in_runs_and_one_by_one() -> None:
    mix = searched.mix("ladder@1", "ladder@2", "drop@4", "desync-4x@6", "desync-4x@8", "int8@0", "int8@5")
    recipe = recipe_of(mix)
    passes = {p.pass_name: p.options for p in recipe.passes}
    assert passes["ladder"]["layers"] == "1-2"
    assert passes["drop_sync"]["layers"] == [4]
    assert passes["desync"] == {"n": 4, "resync": "sum", "layers": "6-9"}
    assert passes["quantize_collectives"] == {"format": "int8", "layers": [0, 5]}
    assert Recipe.parse(recipe.to_yaml()).build() == recipe.build()


def test_a_recipe_keeps_its_measurements() -> None:
    text = recipe_with_measurements(searched.result())
    recipe = Recipe.parse(text)
    recipe.build()
    assert recipe.measured is not None
    assert recipe.measured.budget == 0.01
    assert recipe.measured.speedup == 1.2
    assert recipe.measured.calibration.rise == pytest.approx(0.008)
    assert recipe.measured.held_out is not None
    assert Recipe.parse(recipe.to_yaml()) == recipe
    with pytest.raises(RewriterError, match=r"measured\.calibration.*rize"):
        Recipe.parse(text.replace("rise:", "rize:", 1))


# --- the optimizer ---


def brute(layers: int, options: list[Option]) -> list[tuple[float, float]]:
    """(cost, gain) of the mixes that no other beats, by rising cost: every mix is written out."""

    def go(layer: int, before: str) -> Iterator[tuple[float, float]]:
        if layer == layers:
            yield 0.0, 0.0
            return
        for option in [Option(layer, 1), *(o for o in options if o.start == layer)]:
            gain = option.gain - (option.edge if option.rewrite != before else 0.0)
            for cost, more in go(layer + option.layers, option.rewrite):
                yield option.cost + cost, gain + more

    kept: list[tuple[float, float]] = []
    for cost, gain in sorted(set(go(0, "")), key=lambda pair: (pair[0], -pair[1])):
        if not kept or gain > kept[-1][1] + 1e-12:
            kept.append((cost, gain))
    return kept


@pytest.mark.parametrize("seed", range(4))
def test_the_front_is_that_of_all_mixes(seed: int) -> None:
    draw = random.Random(seed)
    layers, names = 4, ["ladder", "drop", "desync-4x", "parallel"]
    edges = {name: draw.randint(-10, 30) / 10 for name in names}
    options = [
        Option(n, BY_NAME[name].layers, name, format, draw.randint(1, 40) / 100, draw.randint(0, 50) / 10, edges[name])
        for name in names for n in range(layers - BY_NAME[name].layers + 1) for format in ("", "int8")
    ]  # fmt: skip
    options += [Option(n, 1, "", "int8", draw.randint(0, 20) / 1000, draw.randint(0, 9) / 10) for n in range(layers)]
    wanted = brute(layers, options)
    assert len(wanted) > 5
    for estimate, (cost, gain) in zip(front(layers, options), wanted, strict=True):
        assert estimate.cost == pytest.approx(cost, abs=1e-9)
        assert estimate.gain == pytest.approx(gain, abs=1e-9)


def test_the_mix_of_an_estimate_has_its_cost() -> None:
    costs = Costs({searched.mix(f"drop@{n}"): 0.01 * (n + 1) for n in range(5)})
    options = [Option(n, 1, "drop", cost=0.01 * (n + 1), gain=1.0) for n in range(5)]
    estimates = front(5, options)
    assert [len(e.mix.placements) for e in estimates] == [0, 1, 2, 3, 4, 5]
    assert estimates[1].mix == searched.mix("drop@0")
    for estimate in estimates:
        assert estimate.cost == pytest.approx(costs.of(estimate.mix))
        assert estimate.gain == len(estimate.mix.placements)


# --- estimates ---


def test_factors_are_found_again() -> None:
    alone = {searched.mix(f"{name}@{n}"): 0.01 * (n + 1) for n in range(6) for name in ("drop", "ladder")}
    alone |= {searched.mix(f"int8@{n}"): 1e-4 for n in range(6)}
    costs, truth = Costs(alone), Costs(alone, {"drop": 1.5, "ladder": 0.7, "int8": 1.0})
    draw = random.Random(0)
    mixes = [
        mix_of([PlacedRewrite(n, draw.choice(["drop", "ladder"])) for n in draw.sample(range(6), 3)]) for _ in range(30)
    ]
    fitted = costs.fitted({mix: truth.of(mix) for mix in mixes})
    assert fitted.factors["drop"] == pytest.approx(1.5, rel=0.02)
    assert fitted.factors["ladder"] == pytest.approx(0.7, rel=0.02)
    assert costs.fitted({}) == costs
    both = Option(2, 2, "desync-4x", "int8")
    assert Costs({**alone, searched.mix("desync-4x@2"): 0.5}).option(both) == pytest.approx(0.5 + 2e-4)
    assert costs.option(both) == float("inf")  # it does not apply there


def test_agreement_counts_pairs_that_differ_by_more_than_their_errors() -> None:
    assert agreement([1, 2, 3], [10, 20, 30], [0, 0, 0]) == 1
    assert agreement([3, 2, 1], [10, 20, 30], [0, 0, 0]) == -1
    assert agreement([1, 3, 2], [10, 20, 21], [1, 1, 1]) == 1
    assert agreement([], [], []) == 1


def test_a_rise_is_a_mean_over_windows() -> None:
    changes = [WindowChange(2.0, 1.0, 10, 9), WindowChange(4.0, 3.0, 10, 9)]
    given, own = rise_of(changes, 2.0), rise_of(changes, 2.0, own=True)
    assert given.rise == given.seen == own.seen == pytest.approx(4 / 18)
    assert own.rise == own.kl == pytest.approx(0.3)
    assert own.error == pytest.approx(0.1)
    assert given.relative == pytest.approx(given.rise / 2)


# --- seconds ---


@pytest.mark.parametrize("name", ["ladder", "drop", "desync-4x"])
def test_a_run_of_a_rewrite_gains_what_is_said(directory: Path, name: str) -> None:
    """Also of a length that was not simulated: each placement gains as much, and the run loses its edge once."""
    gains = Gains(trace(directory), Workload(tp=3, prompt=64, generate=16), Cluster("pcie-gen4"))
    length = BY_NAME[name].layers
    gain = gain_of(gains, name, range(searched.LAYERS - length + 1))
    assert gain is not None
    each, edge = gain
    run = gains.speed(mix_of([PlacedRewrite(2 + length * n, name) for n in range(2)]))
    assert run is not None
    saved = gains.standard.seconds - run.seconds
    assert saved > 0
    assert 2 * each - edge == pytest.approx(saved, rel=0.01)


# --- what is kept ---


def test_measurements_are_kept_and_a_line_cut_off_is_not_read(tmp_path: Path) -> None:
    store = Store(tmp_path / "state", {"tp": 3})
    store.put({"a": [1.5, 0.1 + 0.2], "b": {"x": "012"}})
    assert store.path is not None
    with store.path.open("a") as file:
        file.write('{"c": [1,')
    again = Store(tmp_path / "state", {"tp": 3})
    assert again.values["a"] == [1.5, 0.1 + 0.2]
    assert "c" not in again.values
    again.put({"c": 2})
    assert Store(tmp_path / "state", {"tp": 3}).values["c"] == 2
    assert "a" not in Store(tmp_path / "state", {"tp": 2}).values


def test_a_state_that_is_no_json_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path, {})
    assert store.path is not None
    store.path.write_text("what?\n")
    with pytest.raises(RewriterError, match=r"is no JSON. Remove the file"):
        Store(tmp_path, {})
    (tmp_path / "file").write_text("")
    with pytest.raises(RewriterError, match=r"--state .*file: .*Name a directory"):
        Store(tmp_path / "file", {})


# --- what is refused ---


def test_an_unknown_fabric_is_refused_first(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(RewriterError, match=r"pcie-gen9.*pcie-gen5"):
        search(directory, asked(fabric="pcie-gen9"), state=tmp_path / "state")
    assert not (tmp_path / "state").exists()


def test_a_model_without_weights_is_refused(tmp_path: Path, directory: Path) -> None:
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    with pytest.raises(RewriterError, match=r"it has a config and no weights.*config.json and safetensors"):
        search(tmp_path, asked(), state=tmp_path / "state")
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("job", "message"),
    [
        *(
            (dict(budget=budget), "--loss .*expected a rise in loss above 0")
            for budget in (0.0, -0.01, math.nan, math.inf)
        ),
        (dict(tp=1), "--tp 1: one rank sends nothing.*Give --tp 2 or more"),
    ],
)
def test_what_cannot_be_searched_is_refused(job: dict[str, Any], message: str) -> None:
    with pytest.raises(RewriterError, match=message):
        asked(**job)


def test_a_text_needs_a_tokenizer(directory: Path) -> None:
    with pytest.raises(RewriterError, match=r"it has no tokenizer.*leave out --calibration"):
        search(directory, asked(text="Some words."))


def test_a_text_has_to_be_long_enough() -> None:
    with pytest.raises(RewriterError, match=r"the given text gives 12 tokens; at least 48 are needed"):
        search(TINY_LLAMA, asked(tp=2, text="Some words."))


@pytest.mark.slow
def test_a_budget_that_nothing_meets_is_one_clear_sentence(directory: Path) -> None:
    """Without sharing tokens, which is exact: no rewrite of a layer changes so little."""
    small = Asked(Workload(tp=3, sp=1, prompt=16, generate=4), Cluster("h100-nvlink"), 1e-11, windows=(2, 2))
    with pytest.raises(
        RewriterError, match=r"--loss 1e-11 .*no faster recipe stays within it; the mildest rewrite"
    ) as info:
        search(directory, small)
    assert "\n" not in str(info.value)
    assert "Give a larger budget" in str(info.value)


# --- a whole search, small ---


@pytest.mark.slow
def test_a_search_that_was_cut_off_comes_to_the_same(directory: Path, tmp_path: Path) -> None:
    """Also one of another budget begins with what was measured."""
    job = Asked(Workload(tp=3, sp=1, prompt=64, generate=16), Cluster("pcie-gen4"), 0.05, windows=(2, 2))
    whole = search(directory, job, state=tmp_path / "whole")
    (kept,) = (tmp_path / "whole").iterdir()
    lines = kept.read_bytes().splitlines(keepends=True)
    assert len(lines) > 5
    cut = tmp_path / "cut" / kept.name
    cut.parent.mkdir()
    cut.write_bytes(b"".join(lines[: len(lines) // 2]) + lines[len(lines) // 2][:20])
    again = search(directory, job, state=tmp_path / "cut")
    assert json.dumps(again.to_json() | {"seconds": 0}) == json.dumps(whole.to_json() | {"seconds": 0})
    assert kept.read_bytes() == cut.read_bytes()

    assert whole.chosen.rise.relative <= 0.05
    assert whole.chosen.held_out is not None
    assert whole.chosen.held_out.relative <= 0.05
    assert whole.chosen.speedup > 1
    assert whole.chosen in whole.points
    for faster, slower in itertools.pairwise(whole.front):
        assert faster.speed.seconds < slower.speed.seconds
        assert faster.rise.rise > slower.rise.rise
    assert {s.rewrite for s in whole.singles} == {r.name for r in REWRITES} | set(FORMATS)

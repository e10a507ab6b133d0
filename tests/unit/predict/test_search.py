"""Searching mixes: keys and recipes of mixes, greedy orders, what is kept, and what is refused."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import searched
from repository import TINY_LLAMA

from rewriter.common.errors import RewriterError
from rewriter.predict.search.choices import REWRITES, Mix, Part, recipe_of
from rewriter.predict.search.computed import WindowChange
from rewriter.predict.search.gains import Gains
from rewriter.predict.search.greedy import Option, Order, greedy
from rewriter.predict.search.measurements import Store
from rewriter.predict.search.result import rise_of
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


def test_equal_mixes_have_equal_keys() -> None:
    mix = searched.mix("drop@3", "int8@2", "ladder@0", "int4-hadamard@0", base="ulysses")
    assert mix.key == "ulysses int4-hadamard@0 ladder@0 int8@2 drop@3"
    assert mix == Mix(mix.parts[::-1], "ulysses")
    assert Mix().key == "tensor-parallel"


@pytest.mark.parametrize(
    ("one", "other", "exclude"),
    [
        (Part(1, "drop"), Part(1, "ladder"), True),
        (Part(1, "drop-mlps"), Part(4, "prompt-drop"), True),
        (Part(1, "drop-mlps"), Part(5, "drop"), False),
        (Part(1, "drop"), Part(1, "int8"), False),
        (Part(1, "int8"), Part(1, "prompt-int8"), True),
    ],
)
def test_a_layer_has_one_rewrite_and_one_format(one: Part, other: Part, exclude: bool) -> None:
    assert one.excludes(other) == other.excludes(one) == exclude


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
    text = searched.result().recipe
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


# --- greedy orders ---


def drops(*costs_and_gains: tuple[float, float]) -> list[Option]:
    return [Option(Part(n, "drop"), cost, gain) for n, (cost, gain) in enumerate(costs_and_gains)]


def test_options_are_taken_by_gain_per_cost_in_place_of_those_that_exclude_them() -> None:
    options = drops((2.0, 2.0), (1.0, 3.0), (1.0, 0.0), (1.0, -1.0))
    options += [Option(Part(0, "desync-4x"), 4.0, 8.0), Option(Part(0, "int8"), 0.1, 0.15)]
    options += [Option(Part(4, "ladder"), 0.1, None)]
    wanted = [(), ("drop@1",), ("desync-4x@0",), ("desync-4x@0", "int8@0")]
    order = Order(options)
    assert [order.mix(n) for n in range(len(order.mixes))] == [searched.mix(*words) for words in wanted]
    assert [order.at(cost) for cost in (0.9, 1.0, 4.0, math.inf)] == [searched.mix(*words) for words in wanted]
    begun = (options[0],)
    assert greedy(options, begun, most=0.9) == [begun, (options[0], options[5])]


def searched_for(order: Order, budget: float, cost_of: dict[Part, float]) -> tuple[float, int]:
    """(most that is gained within the budget, mixes measured), where parts cost in mixes what `cost_of` says."""
    measured: dict[Mix, float] = {}
    for done in range(40):
        if (found := order.next(budget, measured.get, halve=done % 2 == 1)) is None:
            break
        assert found[0] not in measured
        measured[found[0]] = sum(cost_of[part] for part in found[0].parts)
    gains = {option.part: option.gain or 0.0 for option in order.options}
    best = max((sum(gains[p] for p in mix.parts) for mix, cost in measured.items() if cost <= budget), default=0.0)
    return best, len(measured)


@pytest.mark.parametrize("factor", [0.4, 1.0, 2.5])
@pytest.mark.parametrize("seed", range(4))
def test_an_order_comes_near_the_best_of_all_mixes(seed: int, factor: float) -> None:
    """It lacks the gain of one part at most, of all sets of parts, where they cost more or less in a mix than alone."""
    draw = random.Random(seed)
    options = drops(*((draw.uniform(0.5, 2), draw.uniform(0.5, 2)) for _ in range(12)))
    cost_of = {o.part: o.cost * factor * draw.uniform(0.9, 1.1) for o in options}
    budget = 5.0 * factor
    sets = [some for n in range(len(options)) for some in itertools.combinations(options, n)]
    best = max(sum(o.gain or 0.0 for o in some) for some in sets if sum(cost_of[o.part] for o in some) <= budget)
    found, measured = searched_for(Order(options), budget, cost_of)
    assert best - max(o.gain or 0.0 for o in options) <= found <= best + 1e-9
    assert measured <= 12


def test_a_rise_is_a_mean_over_windows() -> None:
    changes = [WindowChange(2.0, 1.0, 10, 9), WindowChange(4.0, 3.0, 10, 9)]
    given, own = rise_of(changes, 2.0), rise_of(changes, 2.0, own=True)
    assert given.rise == given.seen == own.seen == pytest.approx(4 / 18)
    assert own.rise == own.kl == pytest.approx(0.3)
    assert own.error == pytest.approx(0.1)
    assert given.relative == pytest.approx(given.rise / 2)


# --- seconds ---


@pytest.mark.parametrize("name", ["ladder", "drop", "desync-4x"])
def test_a_rewrite_gains_what_is_said_in_runs_of_other_lengths(directory: Path, name: str) -> None:
    gains = Gains(trace(directory), Workload(tp=3, prompt=64, generate=16), Cluster("pcie-gen4"))
    length = REWRITES[name].layers
    gain = gains.gain(name, range(searched.LAYERS - length + 1))
    assert gain is not None
    one, two = (gains.speed(Mix(tuple(Part(2 + length * n, name) for n in range(count)))) for count in (1, 2))
    assert one is not None
    assert two is not None
    assert one.seconds - two.seconds > 0
    assert gain == pytest.approx(one.seconds - two.seconds, rel=0.01)


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
    assert {option.part.name for option in whole.singles} == set(REWRITES)

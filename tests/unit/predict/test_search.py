"""Searching mixes: their keys and recipes, greedy ones, what is kept, what is refused, and what is found."""

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
from rewriter.ir import Program
from rewriter.predict.search import choices
from rewriter.predict.search.choices import PROMPT, REWRITES, Mix, Option, Part, greedy, recipe_of, toward
from rewriter.predict.search.measured import Store
from rewriter.predict.search.run import Asked, Gains, opened, search
from rewriter.predict.workload import Cluster, Workload
from rewriter.recipes import Recipe

PCIE = Cluster("pcie-gen4")


def asked(tp: int = 3, budget: float = 0.01, cluster: Cluster = PCIE, text: str | None = None) -> Asked:
    return Asked(Workload(tp=tp, sp=1, prompt=64, generate=16), cluster, budget, text, windows=(2, 2))


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
    assert bool(one.places & other.places) == exclude


def test_a_recipe_names_layers_in_runs_and_one_by_one_each_in_its_phase() -> None:
    mix = searched.mix(
        "ladder@1", "ladder@2", "drop@4", "desync-4x@6", "desync-4x@8", "int8@0", "int8@5", "prompt-drop@3",
        "prompt-int8@1", "prompt-int8@2",
    )  # fmt: skip
    recipe = recipe_of(mix)
    assert [(p.pass_name, p.options) for p in recipe.passes if p.options] == [
        ("ladder", {"layers": "1-2"}),
        ("drop_sync", {"layers": [4]}),
        ("desync", {"n": 4, "resync": "sum", "layers": "6-9"}),
        ("drop_sync", {"phase": "prompt", "layers": [3]}),
        ("quantize_collectives", {"format": "int8", "layers": [0, 5]}),
        ("quantize_collectives", {"format": "int8", "phase": "prompt", "layers": "1-2"}),
    ]
    assert Recipe.parse(recipe.to_yaml()).build() == recipe.build()
    prompt = [name.removeprefix(PROMPT) for name, rewrite in REWRITES.items() if rewrite.prompt]
    assert prompt == [name for name, rewrite in REWRITES.items() if not rewrite.prompt]


def test_a_recipe_keeps_its_measurements() -> None:
    text = searched.result().recipe
    recipe = Recipe.parse(text)
    recipe.build()
    assert recipe.measured == searched.result().measured
    assert Recipe.parse(recipe.to_yaml()) == recipe
    with pytest.raises(RewriterError, match=r"measured\.calibration.*rize"):
        Recipe.parse(text.replace("rise:", "rize:", 1))


# --- greedy mixes ---


def drops(*costs_and_gains: tuple[float, float]) -> list[Option]:
    return [Option(Part(n, "drop"), cost, gain) for n, (cost, gain) in enumerate(costs_and_gains)]


def test_options_are_taken_by_gain_per_cost_in_place_of_those_that_exclude_them() -> None:
    options = drops((2.0, 2.0), (1.0, 3.0), (1.0, 0.0), (1.0, -1.0))
    options += [Option(Part(0, "desync-4x"), 4.0, 8.0), Option(Part(0, "int8"), 0.1, 0.15)]
    wanted = [(), ("drop@1",), ("desync-4x@0",), ("desync-4x@0", "int8@0")]
    found = [Mix(tuple(option.part for option in taken)) for taken in greedy(options)]
    assert found == [searched.mix(*words) for words in wanted]
    begun = [options[0]]
    assert greedy(options, begun, most=0.9) == [begun, [options[0], options[5]]]


@pytest.mark.parametrize("factor", [0.4, 1.0, 2.5])
@pytest.mark.parametrize("seed", range(4))
def test_greedy_mixes_come_near_the_best_of_all(seed: int, factor: float) -> None:
    """They lack the gain of one part at most, of all sets of parts, where these cost more or less in a mix than alone.
    Mixes are measured once."""
    draw = random.Random(seed)
    options = drops(*((draw.uniform(0.5, 2), draw.uniform(0.5, 2)) for _ in range(12)))
    cost_of, gain_of = (
        {o.part: o.cost * factor * draw.uniform(0.9, 1.1) for o in options},
        {o.part: o.gain for o in options},
    )
    budget, measured = 5.0 * factor, dict[Mix, float]()
    for mix, _ in toward(options, "tensor-parallel", lambda m: measured[m] <= budget if m in measured else None):
        assert mix not in measured
        measured[mix] = sum(cost_of[part] for part in mix.parts)
    found = max(sum(gain_of[part] for part in mix.parts) for mix, cost in measured.items() if cost <= budget)
    sets = [some for n in range(len(options)) for some in itertools.combinations(cost_of, n)]
    best = max(sum(gain_of[part] for part in some) for some in sets if sum(cost_of[part] for part in some) <= budget)
    assert best - max(gain_of.values()) <= found <= best + 1e-9
    assert len(measured) <= 12


# --- seconds ---


@pytest.mark.parametrize("name", ["ladder", "drop", "desync-4x", "prompt-drop"])
def test_a_rewrite_gains_what_is_said_in_runs_of_other_lengths(program: Program, name: str) -> None:
    """Of the prompt, without what two calls for the prefill change, which counts once in a mix."""
    rewrite = REWRITES[name]
    gains = Gains(program, Workload(tp=3, sp=1, prompt=8192 if rewrite.prompt else 64, generate=16), PCIE)
    starts = range(searched.LAYERS - rewrite.layers + 1 - rewrite.prompt)
    gain = gains.gain([Part(start, name) for start in starts])
    first = 1 if rewrite.prompt else 2
    runs = ([Part(first + rewrite.layers * n, name) for n in range(count)] for count in (1, 2))
    one, two = (gains.speed(Mix(tuple(run))) for run in runs)
    assert one is not None
    assert two is not None
    assert one.seconds - two.seconds > 0
    assert gain == pytest.approx(one.seconds - two.seconds, rel=0.01)
    assert (two.seconds_per_token == gains.standard.seconds_per_token) == rewrite.prompt


def test_what_one_set_of_weights_cannot_serve_is_left_out(program: Program) -> None:
    """As its conversion is refused: exact tokens would need another form of the merged output projection."""
    gains = Gains(program, Workload(tp=3, sp=1), PCIE)
    assert gains.speed(searched.mix("parallel@1", "prompt-int8@1")) is None
    assert gains.speed(searched.mix("parallel-own@1", "prompt-int8@1")) is not None


# --- what is kept ---


def test_measurements_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path / "state", {"tp": 3})
    store.put({"a": [1.5, 0.1 + 0.2], "b": {"x": "012"}})
    again = Store(tmp_path / "state", {"tp": 3})
    assert again.values == {"a": [1.5, 0.1 + 0.2], "b": {"x": "012"}}
    assert Store(tmp_path / "state", {"tp": 2}).values == {}


def test_a_state_that_is_no_json_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path, {})
    assert store.path is not None
    store.path.write_text("what?\n")
    with pytest.raises(RewriterError, match=r"not valid JSON.*Remove the file"):
        Store(tmp_path, {})
    (tmp_path / "file").write_text("")
    with pytest.raises(RewriterError, match=r"--state .*file: .*Name a directory"):
        Store(tmp_path / "file", {})


# --- what is refused ---


def test_an_unknown_fabric_is_refused_first(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(RewriterError, match=r"pcie-gen9.*pcie-gen5"):
        search(directory, asked(cluster=Cluster("pcie-gen9")), state=tmp_path / "state")
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


def test_a_model_larger_than_the_memory_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewriter.check.drift.available_memory", lambda: 1 << 20)
    with pytest.raises(RewriterError, match=r"a search computes with all weights. In fp32 they take 0.\d+ GB"):
        search(directory, asked())


@pytest.mark.slow
def test_a_budget_that_nothing_meets_is_one_clear_sentence(directory: Path) -> None:
    """Without sharing tokens, which is exact: no rewrite of a layer changes so little."""
    small = asked(budget=1e-11, cluster=Cluster("h100-nvlink"))
    with pytest.raises(
        RewriterError, match=r"--loss 1e-11 .*no faster recipe stays within it; the mildest rewrite"
    ) as info:
        search(directory, small)
    assert "\n" not in str(info.value)
    assert "Give a larger budget" in str(info.value)


# --- a whole search, small ---


@pytest.mark.slow
def test_a_search_that_was_cut_off_comes_to_the_same(directory: Path, tmp_path: Path) -> None:
    job = asked(budget=0.05)
    whole = search(directory, job, state=tmp_path / "whole")
    (kept,) = (tmp_path / "whole").iterdir()
    values = json.loads(kept.read_text())
    cut = tmp_path / "cut" / kept.name
    cut.parent.mkdir()
    cut.write_text(json.dumps(dict(itertools.islice(values.items(), len(values) // 2))))
    assert search(directory, job, state=tmp_path / "cut").to_json() == whole.to_json()
    assert kept.read_bytes() == cut.read_bytes()

    assert whole.chosen.calibration.rise <= 0.05
    assert whole.chosen.held_out is not None
    assert whole.chosen.held_out.rise <= 0.05
    assert whole.chosen.speedup > 1
    assert whole.chosen in whole.points
    for faster, slower in itertools.pairwise(whole.front):
        assert faster.speed.seconds < slower.speed.seconds
        assert faster.calibration.rise > slower.calibration.rise
    assert {option.part.name for option in whole.singles} == set(REWRITES)


@pytest.mark.slow
def test_a_search_rewires_the_prompt_where_all_tokens_would_cost_too_much(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of dropped reductions, of all tokens or of the prompt: a long prompt over PCIe, and a budget that lets no layer
    drop its own for all tokens."""
    for name in set(REWRITES) - {"drop", "prompt-drop"}:
        monkeypatch.delitem(choices.REWRITES, name)
    job = Asked(Workload(tp=3, sp=1, prompt=8192, generate=16), PCIE, 0.02, windows=(2, 2))
    found = search(directory, job)
    mix = found.chosen.mix
    assert set(mix.layers) == {"prompt-drop"}
    assert searched.LAYERS - 1 not in mix.layers["prompt-drop"]  # where nothing would be gained
    assert found.chosen.calibration.rise <= 0.02
    assert found.chosen.speedup > 1.05
    assert found.chosen.speed.seconds_per_token == found.standard.seconds_per_token
    measured, gains = opened(directory, job)
    everywhere = Mix(tuple(Part(p.start, "drop") for p in mix.parts))
    speed = gains.speed(everywhere)
    assert speed is not None
    assert speed.seconds_per_token < found.chosen.speed.seconds_per_token
    assert measured.rise(everywhere).rise > 0.02
    assert {option.part.name for option in found.singles} == {"drop", "prompt-drop"}
    assert any(set(p.mix.layers) == {"drop", "prompt-drop"} for p in found.points)  # both under one budget
    assert "phase: prompt" in found.recipe

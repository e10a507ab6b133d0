"""docs/results/when.md: cells that are computed again."""

from __future__ import annotations

import pytest
from repository import ROOT

from benchmarks.predict import when
from rewriter.common.numbers import duration

PAGE = (ROOT / "docs/results/when.md").read_text(encoding="utf-8")
RECIPES = ("ladder-upper-half", "desync-2x-sum")


def row(*first: str, under: str = "## Decode speedup") -> dict[str, str]:
    """The cells of a row of the page by its header, of the first row below `under` that begins with these cells."""
    section = PAGE[PAGE.index(under) :]
    names = section[section.index("| model |") :].splitlines()[0]
    line = next(line for line in section.splitlines() if line.startswith(f"| {' | '.join(first)} |"))
    return dict(zip(*([cell.strip() for cell in text.strip("| ").split(" | ")] for text in (names, line)), strict=True))


def test_three_cells_are_what_is_predicted() -> None:
    chooser = when.Chooser(when.MODELS["Llama 3.1 8B"])
    for number, batch in ((3, 1), (4, 16), (1, 1)):
        cluster = when.CLUSTERS[number]
        cell, told = chooser.decoding(cluster, batch, RECIPES), row("Llama 3.1 8B", cluster.title, str(batch))
        assert cell.exact is not None
        assert told["best exact choice"] == f"{cell.exact.words}: {duration(cell.exact.seconds)}"
        for recipe in RECIPES:
            assert told[f"`{recipe}`"] == f"{round(100 * cell.gain(recipe)):+d} %", (cluster, recipe)


def test_a_prompt_is_what_is_predicted() -> None:
    """On a cluster of which stages are the best exact choice."""
    cluster = when.CLUSTERS[3]
    cells = when.Chooser(when.MODELS["Llama 3.1 8B"]).prefills(cluster, ["desync-2x-sum"])
    told = row("Llama 3.1 8B", cluster.title, "8,192", under="## Prefill speedup")
    assert cells[8192].exact is not None
    assert " stages of " in cells[8192].exact.words
    assert told["best exact choice"] == f"{cells[8192].exact.words}: {duration(cells[8192].exact.seconds)}"
    assert told["`desync-2x-sum`"] == f"{round(100 * cells[8192].gain('desync-2x-sum')):+d} %"


def test_every_model_and_cluster_has_its_rows() -> None:
    for model in when.MODELS:
        for cluster in when.CLUSTERS:
            assert PAGE.count(f"| {model} | {cluster.title} |") == 1 + len(when.BATCHES) + 3


@pytest.mark.parametrize("gains", [{}, {"ladder": 1.0}])
def test_a_recipe_that_gains_little_is_no_answer(gains: dict[str, float]) -> None:
    cell = when.Cell(when.Choice("TP 8", 1.0), {name: when.Choice("TP 8", 1 / gain) for name, gain in gains.items()})
    assert cell.answer(["ladder"]) == "keep the model"
    better = when.Cell(cell.exact, {"ladder": when.Choice("TP 4", 0.8)})
    assert better.answer(["ladder"]) == "`ladder` +25 % (TP 4)"
    assert when.Cell(None, {}).answer(["ladder"]) == "does not fit"


def test_padded_sizes_gain_what_the_page_says() -> None:
    title, cluster = when.UNEVEN[0]
    cell = when.Chooser(when.MODELS[title]).decoding(cluster, 1, (when.FIT,))
    assert cell.exact is not None
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| {title} | {cluster.title} | +"))
    gain = f"{round(100 * cell.gain(when.FIT)):+d} %"
    assert f"| {cell.exact.words}: {duration(cell.exact.seconds)} | {gain} |" in line

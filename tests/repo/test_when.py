"""docs/results/when.md and the README's table: cells that are computed again."""

from __future__ import annotations

import re

import pytest
from repository import ROOT

from benchmarks.predict import when
from rewriter.common.numbers import duration

PAGE = (ROOT / "docs/results/when.md").read_text(encoding="utf-8")
RECIPES = ("ladder-upper-half", "desync-2x-sum")


def row(*first: str) -> dict[str, str]:
    """The cells of a row of the page by its header, of the row that begins with these cells."""
    section = PAGE[PAGE.index("## Decode steps") :]
    names = section[section.index("| model |") :].splitlines()[0]
    line = next(line for line in section.splitlines() if line.startswith(f"| {' | '.join(first)} |"))
    return dict(zip(*([cell.strip() for cell in text.strip("| ").split(" | ")] for text in (names, line)), strict=True))


def test_three_cells_are_what_is_predicted() -> None:
    chooser = when.Chooser(when.MODELS["Llama 3.1 8B"])
    for number, batch in ((3, 1), (4, 16), (1, 1)):
        cluster = when.CLUSTERS[number]
        cell, told = chooser.decoding(cluster, batch, RECIPES), row("Llama 3.1 8B", cluster.title, str(batch))
        assert cell.exact is not None
        assert told["best as it is"] == f"{cell.exact.words}: {duration(cell.exact.seconds)}"
        for recipe in RECIPES:
            assert told[f"`{recipe}`"] == f"{cell.gain(recipe):+.0%}", (cluster, recipe)


def test_every_model_and_cluster_has_its_rows() -> None:
    for model in when.MODELS:
        for cluster in when.CLUSTERS:
            assert PAGE.count(f"| {model} | {cluster.title} |") == 1 + len(when.BATCHES) + 3


def test_the_readme_has_the_gains_of_the_page() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for recipe in when.README_RECIPES:
        cells = re.search(rf"(?m)^\| `{recipe}`[^|]*\|([^|]*)\|[^|]*\|([^|]*)\|", text)
        assert cells is not None
        for shown, cluster in zip(cells.groups(), when.README_CLUSTERS, strict=True):
            gains = [int(row("Llama 3.1 70B", cluster, str(b))[f"`{recipe}`"].rstrip("%")) for b in when.BATCHES]
            assert shown.strip() == f"{min(gains):+d} to {max(gains):+d} %", (recipe, cluster)


@pytest.mark.parametrize("gains", [{}, {"ladder": 1.0}])
def test_a_recipe_that_gains_little_is_no_answer(gains: dict[str, float]) -> None:
    cell = when.Cell(when.Choice("TP 8", 1.0), {name: when.Choice("TP 8", 1 / gain) for name, gain in gains.items()})
    assert cell.answer(["ladder"]) == "keep the model"
    better = when.Cell(cell.exact, {"ladder": when.Choice("TP 4", 0.8)})
    assert better.answer(["ladder"]) == "`ladder` +25%"
    assert when.Cell(None, {}).answer(["ladder"]) == "does not fit"

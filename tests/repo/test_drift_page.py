"""docs/results/drift.md is what `benchmarks/drift/run.py` writes."""

from __future__ import annotations

import importlib
import re
from types import ModuleType

import pytest
from repository import ROOT

from rewriter.recipes.catalogue import library

PAGE = (ROOT / "docs" / "results" / "drift.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return importlib.import_module("benchmarks.drift.run")


def test_the_text_is_the_templates_and_parts_not_measured_again_are_kept(benchmark: ModuleType) -> None:
    template = benchmark.TEMPLATE.read_text(encoding="utf-8")
    parts = benchmark.parts_of(template, PAGE)
    assert set(parts) == set(re.findall(r"<<(\w+)>>", template))
    assert re.sub(r"<<(\w+)>>", lambda name: parts[name[1]], template) == PAGE
    assert benchmark.parts_of(template + "A claim.", PAGE) == {}


def test_every_recipe_is_in_the_tables(benchmark: ModuleType) -> None:
    tiny, smollm2, gemma3 = re.split("\n## Two pretrained models\n|\nGemma 3 270M", PAGE)
    for part, further in ((tiny, set()), (smollm2, {"ladder-last-20"}), (gemma3, set())):
        rows = set(re.findall(r"^\| `([a-z0-9-]+)` \|", part, re.MULTILINE))
        assert rows == set(library()) - set(benchmark.LEFT_OUT) | further


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), [("ladder-upper-half", 2), ("desync-2x-sum", 4), ("drop-sync", 2)])
def test_figures_are_what_the_command_gives(name: str, ranks: int, benchmark: ModuleType) -> None:
    row = benchmark.Bench.build().recipe(name, ranks)
    tiny = PAGE.split("\n## Two pretrained models\n")[0]
    shown = re.search(rf"^\| `{name}` \| {row.ranks or 'any'} \| (\d+) \| ([\d.]+) ± ", tiny, re.MULTILINE)
    assert shown is not None
    assert int(shown[1]) == row.reductions
    assert float(shown[2]) == pytest.approx(row.kl, rel=0.01)

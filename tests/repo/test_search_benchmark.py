"""On the tiny model: what a search finds is faster than what ships and than chance, and is what a conversion writes."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
from repository import TINY_LLAMA

from rewriter.api import convert
from rewriter.predict.search.run import Asked
from rewriter.predict.workload import Cluster, Workload

TP, BUDGET = 4, 0.03


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return importlib.import_module("benchmarks.search.run")


@pytest.mark.slow
@pytest.mark.parametrize("sp", [None, 1], ids=["tokens shared too", "heads alone"])
def test_a_search_beats_what_ships_and_four_hundred_random_mixes(
    benchmark: ModuleType, tmp_path: Path, sp: int | None
) -> None:
    asked = Asked(Workload(tp=TP, sp=sp), Cluster("pcie-gen4"), BUDGET)
    found, others, said = benchmark.compared(str(TINY_LLAMA), asked, 400, tmp_path / "state")
    assert said == []
    assert len(others) > 10 + 20  # what ships, and the random mixes that are as fast as the chosen one
    assert found.chosen.calibration.rise <= BUDGET
    assert found.chosen.held_out is not None
    assert found.chosen.held_out.rise <= BUDGET

    recipe = tmp_path / "found.yaml"
    recipe.write_text(found.recipe)
    report = convert(TINY_LLAMA, recipe, out=tmp_path / "out", tp=found.measured.tp, sp=found.measured.sp)
    assert report.verification

"""benchmarks/predict/backtest.py: its points are cited and consistent, and it predicts them. No test asks how well."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from repository import ROOT

from rewriter.fabric import fabrics

THREE = ("gpt-fast-llama-3.1-8b-tp2", "triton-distributed-h800-qwen3-8b-nccl", "trtllm-h100-llama-3.1-8b-tp2-batch-8")


@pytest.fixture(scope="module")
def backtest() -> ModuleType:
    return importlib.import_module("benchmarks.predict.backtest")


@pytest.fixture(scope="module")
def published(backtest: ModuleType) -> Any:
    return backtest.read_published()


def entries(published: Any) -> list[Any]:
    return [*(point.entry for point in published.points), *published.gains]


def numbers(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"\d+(?:\.\d+)?", text)]


def test_every_value_stands_in_the_line_that_is_quoted(published: Any) -> None:
    for entry in (point.entry for point in published.points):
        assert any(abs(found - entry.value) <= 1e-4 * entry.value for found in numbers(entry.quote)), entry.id
    for gain in published.gains:
        known = numbers(gain.quote)
        ratios = {*known, *(a / b for a in known for b in known if b), *(1 + a / 100 for a in known)}
        assert any(abs(found - gain.value) <= 1e-3 for found in ratios), gain.id
        assert gain.standard is None or gain.standard in known, gain.id


def test_every_point_says_where_it_is_from_and_what_ran(published: Any) -> None:
    for point in published.points:
        source = point.source
        assert re.search(r"\w+\.\w+", source.where), source.name
        assert re.match(r"20\d\d", source.date), source.name
        assert source.fabric in fabrics() or point.fabric.name == source.fabric, source.name
        per_token = point.seconds / (point.entry.prompt if source.measured == "prefill" else 1)
        assert per_token < 1.0, "seconds per token: a unit is wrong"
    assert all(one.what and one.why for one in published.rejected)


def test_there_are_as_many_points_as_the_page_needs(published: Any) -> None:
    counted = [point for point in published.points if not point.entry.not_counted]
    assert len(counted) >= 96
    assert len([point for point in counted if point.source.link != "nvlink"]) >= 25
    assert len({point.fabric.device.name for point in counted}) >= 4


def test_models_are_known(published: Any) -> None:
    models = sys.modules["benchmarks.predict.backtest_points"].read_models()
    assert {entry.model for entry in entries(published)} <= set(models)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda source: source["points"][0].pop("quote"), "quote"),
        (lambda source: source["points"][0].update(value=0), "greater than 0"),
        (lambda source: source.update(unit="hours"), "unit"),
        (lambda source: source.pop("all_reduce"), "no all_reduce"),
        (lambda source: source["points"].append(source["points"][0]), "stand twice"),
    ],
)
def test_a_file_that_lacks_something_is_refused(
    change: Any, said: str, backtest: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["benchmarks.predict.backtest_points"]
    data = yaml.safe_load(module.POINTS[0].read_text(encoding="utf-8"))
    change(data["sources"][0])
    monkeypatch.setattr(module, "POINTS", (file := tmp_path / "points.yaml",))
    file.write_text(yaml.safe_dump(data), encoding="utf-8")
    with pytest.raises(ValidationError, match=said):
        backtest.read_published()


@pytest.mark.slow
def test_points_of_each_kind_are_predicted(
    backtest: ModuleType, published: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two layers of the models, so that it takes seconds."""
    module = sys.modules["benchmarks.predict.backtest_points"]
    shallow = {name: {**fields, "num_hidden_layers": 2} for name, fields in module.read_models().items()}
    monkeypatch.setattr(module, "read_models", lambda: shallow)
    predictions = backtest.Predictions()
    points = [point for point in published.points if point.entry.id in THREE]
    outcomes = [backtest.outcome(point, predictions) for point in points]
    assert {one.point.source.measured for one in outcomes} == {"generation", "step", "server"}
    assert all(one.counted and 0 < one.seconds < one.point.seconds for one in outcomes)
    summary = backtest.Summary.of(outcomes)
    assert (summary.points, summary.devices) == (3, 3)
    gain = next(gain for gain in published.gains if gain.id == "ladder-upper-half-8b-batch-1")
    found = backtest.gain_outcome(gain.model_copy(update={"recipe": "ladder", "gpus": 2}), predictions)
    text = backtest.page(outcomes, [found])
    pages = {links: backtest.points(links, outcomes) for links in backtest.POINTS}
    assert all(f"| {name} |" in pages[backtest.NVLINK] for name in THREE)
    assert not any(f"| {name} |" in pages["PCIe, RoCE and TCP"] for name in THREE)
    assert all(f"../figures/{file}" in text for file in backtest.POINTS.values())
    assert f"{found.predicted:.3f}" in text
    assert published.rejected[0].what in backtest.left_out(outcomes, published)
    assert found.predicted > 1.0
    assert found.saved > 0.0


def test_a_summary_counts_what_counts(backtest: ModuleType, published: Any) -> None:
    first, second, third, *_ = published.points
    outcomes = [
        backtest.Outcome(first, first.seconds * 1.1, first.seconds * 0.9, first.seconds * 1.2),
        backtest.Outcome(second, second.seconds * 0.7, second.seconds * 0.6, second.seconds * 0.8),
        backtest.Outcome(third, third.seconds * 9, why="left out"),
    ]
    summary = backtest.Summary.of(outcomes)
    assert summary.points == 2
    assert summary.median == pytest.approx(0.2)
    assert (summary.share, summary.coverage) == (0.5, 0.5)
    assert backtest.Summary.of(outcomes[2:]) is None


def test_goals_that_are_missed_are_named(backtest: ModuleType, published: Any) -> None:
    """Over all points, over those that are not NVLink, per kind of link, and of gains."""
    over_pcie = [point for point in published.points if point.source.link == "pcie"][:5]
    over_nvlink = [point for point in published.points if point.source.link == "nvlink"][:20]

    def outcomes(points: Any, error: float, inside: int) -> list[Any]:
        """All off by `error`, the first `inside` of them in their intervals."""
        return [
            backtest.Outcome(p, p.seconds * (1 + error), p.seconds * (0.5 if i < inside else 2), p.seconds * 3)
            for i, p in enumerate(points)
        ]

    good = [*outcomes(over_nvlink, 0.05, 16), *outcomes(over_pcie, 0.05, 4)]
    gains = [backtest.GainOutcome(gain, gain.value + 0.01, 0.0) for gain in published.gains[:3]]
    assert backtest.missed(good, gains) == []
    assert backtest.missed([*outcomes(over_nvlink, 0.09, 16), *outcomes(over_pcie, 0.05, 4)], gains) == [
        "all points: median 9.0%, not 8%"
    ]
    assert backtest.missed([*outcomes(over_nvlink, 0.05, 16), *outcomes(over_pcie, 0.13, 4)], gains) == [
        "points that are not NVLink: median 13.0%, not 12%"
    ]
    wide = backtest.missed([*outcomes(over_nvlink, 0.05, 16), *outcomes(over_pcie, 0.05, 5)], gains)
    assert wide == ["link pcie: 100% of 5 in their intervals, not 70% to 90%"]
    assert "link pcie: 60%" in backtest.missed([*good[:20], *outcomes(over_pcie, 0.05, 3)], gains)[0]
    far = backtest.missed([*outcomes(over_nvlink, 0.05, 16), *outcomes(over_pcie, 0.3, 4)], gains)
    assert far[0] == "all points: 80% within 20%, not 90%"
    off = [
        backtest.GainOutcome(gain, gain.value + by, 0.0)
        for gain, by in zip(published.gains, (0.06, -0.06, 0.11), strict=False)
    ]
    assert backtest.missed(good, off) == [
        "gains: median 6.0 points, not 5", f"gain {published.gains[2].id}: 11.0 points, not 10",
    ]  # fmt: skip


def test_the_pages_have_every_point(published: Any) -> None:
    pages = ("left-out", "nvlink", "pcie")
    text = "".join((ROOT / f"docs/figures/backtest-{page}.md").read_text(encoding="utf-8") for page in pages)
    assert all(f"| {point.entry.id} |" in text for point in published.points)
    assert all(one.what in text for one in published.rejected)

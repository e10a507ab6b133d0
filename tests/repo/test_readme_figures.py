"""The README's figures are those of the records: its plot, its recording and the numbers in its sentences."""

from __future__ import annotations

import re
import shlex

import pytest
import recording
from repository import ROOT

from benchmarks.healing import page as healing
from benchmarks.predict import gains

README = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


def test_the_plot_is_drawn_from_the_pages() -> None:
    found = gains.gains(gains.WHEN.read_text(encoding="utf-8"))
    assert gains.picture(found, gains.costs()) == gains.FIGURE.read_text("utf-8"), "python -m benchmarks.predict.gains"


def test_the_plot_has_every_gain_of_the_page() -> None:
    """Read again from the page, row by row."""
    page, drawn = gains.WHEN.read_text(encoding="utf-8"), gains.FIGURE.read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith(f"| {gains.MODEL} | NVLink: 8 H200 | 8,192 |")]
    [row] = [[cell.strip() for cell in line.strip("|").split("|")] for line in rows]
    header = next(line for line in page.splitlines() if line.startswith("| model | GPUs | prompt |"))
    column = [cell.strip(" `") for cell in header.strip("|").split("|")].index("desync-2x-sum")
    assert f"desync-2x-sum, NVLink: 8 H200: {row[column]}" in drawn
    fits = sum(
        re.search(rf"^\| {gains.MODEL} .*\| 16 \| (?!does not fit)", line) is not None for line in page.splitlines()
    )
    assert drawn.count("<circle") == fits * (3 + 4 + 4) + len(gains.RECIPES)


def test_the_costs_in_the_plot_are_of_the_longest_runs() -> None:
    costs = gains.costs()
    assert costs["ladder-upper-half"].tokens == 393_216
    assert costs["ladder-upper-half"].healed == pytest.approx(0.0264, abs=1e-4)
    assert costs["desync-2x-sum"].ranks == 3
    assert "+31% → +2.6% after 393,216 tokens; perplexity of prose 13.8 → 16.7" in gains.FIGURE.read_text("utf-8")


def test_the_recording_is_drawn_from_what_was_recorded() -> None:
    assert recording.picture(recording.kept()) == recording.FIGURE.read_text("utf-8"), "python tools/docs/recording.py"
    assert [line for line, _ in recording.kept()] == list(recording.COMMANDS)


def test_the_recording_shows_what_healing_does() -> None:
    (_, converted), (_, bad), (_, healed), (_, good) = recording.kept()
    assert "Paris" not in bad
    assert "Paris" in good
    assert "heal" in converted + healed
    commands = [shlex.split(line.split("|")[0]) for line in recording.COMMANDS]
    for words in commands:  # those of the README
        assert " ".join(words[:2]) in README


def test_the_readmes_losses_are_those_of_the_records() -> None:
    runs = [run for run in healing.read()["runs"] if run["way"] == "defaults"]
    [gemma] = [run for run in runs if run["model"] == "gemma3"]
    prose = gemma["perplexity"]
    assert f"{healing.above(gemma, 'after'):.1%}".replace("%", " %") + " above the original's" in README
    assert (
        f"after {gemma['tokens']:,} tokens (perplexity of prose {prose['original']:.1f} → {prose['after']:.1f})"
        in README
    )
    page = (ROOT / "docs/results/adaptation.md").read_text(encoding="utf-8")
    for task in ("mean", "common knowledge"):
        [row] = re.findall(rf"^\| {task} \|(.*)\|$", page, re.MULTILINE)
        original, _, healed = [float(cell.split("%")[0]) for cell in row.split("|")[1:]]
        assert f"{healed:g} %" in README, task
        assert f"the original {original:g} %" in README, task


def test_the_readmes_speeds_are_those_of_the_pages() -> None:
    serving = (ROOT / "docs/figures/serving.md").read_text(encoding="utf-8")
    for recipe, hidden, time in (("ladder-upper-half", "40 %", "1.07"), ("ladder", "86 %", "1.05")):
        assert re.search(rf"^\| {recipe} \| \d+ \| \d+ \| {hidden} \| {time} ", serving, re.MULTILINE)
    assert "`ladder-upper-half` hides 40 % of it, `ladder` 86 %" in README
    assert "1.07 and 1.05 × the time of the original" in README
    points = re.search(
        r"\*\*(\d+) points .*?median \|error\| ([\d.]+)%", (ROOT / "docs/results/backtest.md").read_text("utf-8")
    )
    assert points
    assert f"Predictions of {points[1]} public times are off by {points[2]} % in the median" in README

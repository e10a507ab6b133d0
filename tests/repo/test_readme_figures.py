"""The README's figures are those of the records: its plot, its recording and the numbers in its sentences."""

from __future__ import annotations

import re
import shlex

import recording
from repository import ROOT

from benchmarks.healing import page as healing
from benchmarks.predict import gains
from rewriter.fabric import fabrics

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
    assert costs["ladder-upper-half"] == ("+31% → +2.6% after 393,216 tokens; perplexity of prose 13.8 → 37 → 16.7")
    assert costs["desync-2x-sum"].endswith("; bound to 3 ranks")
    page = (ROOT / "docs/results/prefill.md").read_text(encoding="utf-8")
    [row] = re.findall(r"^\| `prefill-desync-2x-sum` \| 3 \| without repeats \| 99,840 \|(.*)$", page, re.MULTILINE)
    before, after = (cell.split(",")[0].strip() for cell in row.split("|")[:2])
    assert costs["prefill-desync-2x-sum"].startswith(f"manuals {before} → {after}, ")


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
    runs = {
        (run["model"], run["recipe"], run["tokens"]): run for run in healing.read()["runs"] if run["way"] == "defaults"
    }
    gemma = runs["gemma3", "ladder-upper-half", 24_576]
    above, prose = f"{100 * healing.above(gemma, 'after'):.1f} %", gemma["perplexity"]
    said = f"is {above} above the original's loss after 24,576 tokens"
    assert f"{said} (perplexity of prose {prose['original']:.1f} → {prose['after']:.1f})" in README
    assert "`ladder-upper-half`, healed by 393,216 tokens: loss" in README
    own = runs["smollm2", "ladder-own-partial", 393_216]
    prose = own["perplexity"]
    assert f"`ladder-own-partial` ({prose['original']:.1f} → {prose['after']:.1f})" in README
    assert f"healed on {own['tp']}, plotted on 4 or more" in README
    upper = runs["smollm2", "ladder-upper-half", 393_216]
    prose = upper["perplexity"]
    said = f"loss +{100 * healing.above(upper, 'after'):.1f} % on text that the original wrote"
    rise = 100 * (prose["after"] / prose["original"] - 1)
    assert f"{said}, but perplexity of prose {prose['original']:.1f} → {prose['after']:.1f} (+{rise:.0f} %)" in README
    ladder = 100 * healing.above(runs["smollm2", "ladder", 131_072], "after")
    assert f"stays {ladder:.0f} % above" in README
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
    assert "`ladder-upper-half` hides 40 % of the added time (half is its limit), `ladder` 86 %" in README
    assert "1.07 and 1.05 × the time of the original" in README
    backtest = (ROOT / "docs/results/backtest.md").read_text("utf-8")
    points = re.search(r"\*\*(\d+) points .*?median \|error\| ([\d.]+)%", backtest)
    assert points
    assert f"Predictions of {points[1]} public times" in README
    assert f"are off by {points[2]} % in the median" in README
    [h200] = re.findall(r"^\| fabric h200-nvlink \| \d+ \| ([\d.]+)% ", backtest, re.MULTILINE)
    assert f"H200: {h200} %; no held-out test)" in README
    [l40s] = re.findall(r"^\| fabric pcie-gen4 \| \d+ \| ([\d.]+)% ", backtest, re.MULTILINE)
    assert f"(8 L40S: {l40s} %" in README
    gains = re.search(r"of (\d+) published gains are off by ([\d.]+) percentage points", backtest)
    assert gains
    assert f"of {gains[1]} public gains by {gains[2]} points" in README
    assert f"knows {len(fabrics())} clusters" in README


def test_the_readmes_largest_gain_over_nvlink_is_the_pages() -> None:
    """Of a decode step of 1 or 16 sequences, among the recipes that were healed."""
    page = gains.WHEN.read_text(encoding="utf-8")
    [(header, _, *rows)] = [table for table in gains.tables(page) if table[0][2] == "batch"]
    healed = [header.index(recipe) for recipe in gains.RECIPES if recipe in header]
    asked = [row for row in rows if row[1] == "NVLink: 8 H200" and row[2] in ("1", "16")]
    largest = max(int(row[column].split()[0]) for row in asked for column in healed)
    assert f"16 sequences or fewer: predicted gains are at most {largest} %" in README


def test_the_readmes_coverage_is_the_pages() -> None:
    said = re.search(r"works on (\d+) of the (\d+) model types", README)
    assert said
    page = (ROOT / "docs/results/coverage.md").read_text(encoding="utf-8")
    assert f"{said[1]} of {said[2]}" in page or f"{said[1]} of the {said[2]}" in page

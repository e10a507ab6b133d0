"""docs/results/papers.md: commands and options exist, and every figure stands on the page that its line links to."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from repository import ROOT

from rewriter.common.packages import VERSION

PAGE = ROOT / "docs/results/papers.md"
ROWS = [
    re.split(r" *\| *", line)[1:-1]
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith(("| claim |", "| --- |"))
]
COMMANDS = sorted({command for row in ROWS for command in re.findall(r"`((?:sudo |python )[^`]+)`", " ".join(row))})
PAPERS = ("Ladder Residual", "Desynced Residual", "Sync-Point Drop", "Attention2D", "ZeRO++", "DeepSpeed", "NeuronaBox")


def file_of(module: str) -> Path:
    """The file that `python -m MODULE` runs."""
    spec = find_spec(f"{module}.__main__") if (ROOT / module.replace(".", "/")).is_dir() else find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    return Path(spec.origin)


def faults(command: str) -> list[str]:
    """The words of a command that name no module, file, option or choice of today."""
    words = shlex.split(command.removeprefix("sudo "))
    assert words[0] in ("python", ".venv/bin/python"), command
    assert words[1] == "-m", command
    if words[2] == "pytest":
        return [word for word in words[3:] if not (ROOT / word).exists()]
    try:
        source = file_of(words[2]).read_text(encoding="utf-8")
    except (AssertionError, ImportError):
        return [words[2]]
    names = [word for word in words[3:] if re.fullmatch(r"(--)?[a-z][a-z0-9-]*", word) and "/" not in word]
    recipes = {path.stem for path in (ROOT / "rewriter/recipes/library").glob("*.yaml")}
    sections = (ROOT / "benchmarks/gpu/sections.py").read_text(encoding="utf-8") if "gpu" in words[2] else ""
    return [word for word in names if f'"{word}"' not in source + sections and word not in recipes]


def numbers(text: str) -> list[str]:
    """The numbers of a text; not those in names (`desync-2x`, fp64)."""
    return re.findall(r"(?<![\w.-])\d+(?:,\d{3})*(?:\.\d+)?(?!\w)", re.sub(r"`[^`]*`", "", text))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_exists(command: str) -> None:
    assert faults(command) == []


@pytest.mark.parametrize(
    "command",
    [
        "python -m benchmarks.predict.ladder_papers",
        "sudo .venv/bin/python -m benchmarks.zero.run --part volumes",
        "python -m benchmarks.attention.memory --token 4096",
        "python -m benchmarks.gpu.run --only decode-layer",
        "python -m pytest tests/repo/test_oracle.py",
        "python -m benchmarks.healing.run models/smollm2 --recipe desync-3x-sum",
    ],
)
def test_a_command_that_does_not_exist_is_found(command: str) -> None:
    assert faults(command) != []


@pytest.mark.parametrize("row", ROWS, ids=[f"{row[0][:40]}" for row in ROWS])
def test_a_line_has_a_figure_from_its_page_or_a_reason(row: list[str]) -> None:
    claim, command, figure, verdict = row
    pages = re.findall(r"\]\(([\w/.]+\.md)\)", figure)
    found = " ".join((PAGE.parent / page).read_text(encoding="utf-8") for page in pages)
    stated = re.sub(r"\(\[.*", "", figure)
    if claim.startswith("Not a claim of the paper"):
        assert (bool(pages), verdict) == (True, "")
        return
    assert re.match(r"(1\.23 )?(met|missed|partly|not tried|not comparable)", verdict)
    assert pages or not stated
    assert [number for number in numbers(stated) if number not in numbers(found)] == []
    if "not tried" in verdict and not pages:
        assert len(verdict) > len("not tried: ")
    assert (command == "–") <= verdict.startswith("not tried")


def test_a_figure_that_its_page_lacks_is_found() -> None:
    assert numbers("H100: 89 % hidden, fp64, `desync-2x`, 9,362.1") == ["89", "9,362.1"]


def test_every_paper_has_met_missed_or_untried_claims() -> None:
    sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    assert [section.startswith(paper) for section, paper in zip(sections, PAPERS, strict=True)] == [True] * len(PAPERS)
    assert all(re.search(r"\| (met|missed)", section) for section in sections)
    assert len(ROWS) >= 40


def test_the_citation_file_has_the_papers_and_the_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == VERSION
    numbers = {reference["identifiers"][0]["value"].split("/")[-1] for reference in cited["references"]}
    linked = set(re.findall(r"arxiv\.org/abs/([\d.]+\d)", PAGE.read_text(encoding="utf-8")))
    assert len(linked) == 5
    assert numbers == linked | {"2609.13846"}

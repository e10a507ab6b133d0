"""The version matrix: its page is what its results give, and declared ranges are what passed."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from matrix import __main__ as command
from matrix import cells as table
from matrix.cells import Cell
from packaging.requirements import Requirement
from repository import ROOT

from rewriter.cli.doctor_report import TRIED

GREEN = {"outcome": "green", "date": "2026-11-25", "commit": "abc", "seconds": 60.0, "tests": 57, "versions": {}}
RED = {**GREEN, "outcome": "red", "why": "FAILED tests/a.py::b | c"}
OLDEST = Cell("3.11", "2.11", "5.17")


def test_the_page_is_made_from_the_results() -> None:
    assert table.PAGE.read_text(encoding="utf-8") == table.page(table.results())


def test_every_cell_has_passed_and_declared_ranges_end_where_the_matrix_does() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    ranges = {r.name: r.specifier for r in map(Requirement, declared)}
    known = table.results()
    red = {cell.name: known[cell.name] for cell in table.cells() if known[cell.name]["outcome"] != "green"}
    assert not red
    for package, versions in (("torch", table.TORCHES), ("transformers", table.TRANSFORMERS)):
        assert all(ranges[package].contains(f"{version}.0") for version in versions)
        assert TRIED[package] == versions
        major, first, last = *versions[0].split("."), versions[-1].split(".")[1]
        assert not ranges[package].contains(f"{major}.{int(first) - 1}.9")
        assert not ranges[package].contains(f"{major}.{int(last) + 1}.0")


def test_every_version_meets_both_ends_of_the_others() -> None:
    cells = list(table.cells())
    assert len(cells) == len(set(cells)) == 26
    for python in table.PYTHONS:
        pairs = {(cell.torch, cell.transformers) for cell in cells if cell.python == python}
        assert {torch for torch, _ in pairs} == set(table.TORCHES)
        assert all({(torch, "5.17"), (torch, "5.24")} <= pairs for torch in table.TORCHES)
        assert all((table.PINNED, transformers) in pairs for transformers in table.TRANSFORMERS)
    assert f"torch=={table.PINNED}." in (ROOT / "constraints.txt").read_text(encoding="utf-8")


def test_the_page_names_what_failed_and_what_is_absent() -> None:
    known = {OLDEST.name: RED, Cell("3.12", "2.11", "5.17").name: GREEN}
    page = table.page(known | {Cell("3.12", "2.15", "5.24").name: {**RED, "outcome": "absent", "why": "no python3.12"}})
    assert "| 2.11 | **3.11 fails**, 3.12 |  |  |  |  |" in page
    assert "| 2.15 |  |  |  |  | 3.12 is absent |" in page
    assert "2 of 26 cells were tried, 1 passed. No interpreter of Python 3.12 was on the machine." in page
    assert f"What failed: `{OLDEST.name}`." in page
    assert "| 60 | red: FAILED tests/a.py::b \\| c |" in page


def test_an_absent_interpreter_does_not_replace_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(table, "PAGE", tmp_path / "page.md")
    table.keep(OLDEST.name, GREEN)
    table.keep(OLDEST.name, {**RED, "outcome": "absent"})
    assert table.results() == {OLDEST.name: GREEN}
    table.keep(OLDEST.name, RED)
    assert table.results() == {OLDEST.name: RED}
    assert (tmp_path / "page.md").read_text() == table.page({OLDEST.name: RED})


def test_a_known_cell_is_left_out_and_a_failed_one_is_tried_again_on_demand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(table, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(table, "fingerprint", lambda: "now")
    monkeypatch.setattr(command, "Environments", lambda scratch: None)
    monkeypatch.setattr(command, "interpreter", lambda version: Path("python"))
    ran: list[str] = []

    def tried(cell: Cell, *_: object) -> dict[str, object]:
        ran.append(cell.name)
        return {**GREEN, "source": "now"}

    monkeypatch.setattr(command, "tried", tried)
    other = Cell("3.11", "2.11", "5.24").name
    table.keep(OLDEST.name, {**RED, "source": "now"})
    table.keep(other, {**GREEN, "source": "earlier"})
    assert command.main(["--only", "py3.11-torch2.11"]) == 1  # the failed one is known
    assert ran == [other]
    assert command.main(["--only", "py3.11-torch2.11", "--red"]) == 0
    assert command.main(["--only", "py3.11-torch2.11"]) == 0
    assert ran == [other, OLDEST.name]
    assert command.main(["--only", other, "--again"]) == 0
    assert ran == [other, OLDEST.name, other]


def test_a_test_that_was_left_out_is_no_pass() -> None:
    assert command.passed("....\n57 passed, 4 deselected in 84.18s (0:01:24)\nnoise at exit\n") == 57
    with pytest.raises(command.Failed, match="1 skipped"):
        command.passed("56 passed, 1 skipped in 3.00s\n")


def test_the_reason_is_what_pytest_or_pip_says() -> None:
    printed = "a\nFAILED ../../there/tests/a.py::b - assert\nFAILED c\nnoise"
    assert command.reason(printed) == "FAILED tests/a.py::b - assert; FAILED c"
    assert command.reason("ERROR: No matching distribution\nend") == "ERROR: No matching distribution"
    assert command.reason("first\nlast") == "last"


def test_a_step_that_fails_or_hangs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(command.Failed, match="ERROR: no"):
        command.ran(["bash", "-c", "echo ERROR: no; exit 3"], tmp_path)
    monkeypatch.setattr(command, "LIMIT", 0.2)
    with pytest.raises(command.Failed, match="bash: not done after"):
        command.ran(["bash", "-c", "sleep 60"], tmp_path)

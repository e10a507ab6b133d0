"""docs/concepts/security.md: every line of the threat model names tests, and those exist."""

from __future__ import annotations

import ast
import re

import pytest
from repository import ROOT

PAGE = (ROOT / "docs" / "concepts" / "security.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(test_\w+\.py)::(\w+)`", PAGE)))
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and not re.match(r"\| (it|what) \|", line)]


def functions(file: str) -> set[str]:
    tree = ast.parse(next(ROOT.glob(f"tests/*/**/{file}")).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("file", "function"), NAMED, ids=[function for _, function in NAMED])
def test_a_named_test_exists(file: str, function: str) -> None:
    assert function.startswith("test_")
    assert function in functions(file)


def test_every_line_names_one_but_what_is_not_defended() -> None:
    assert len(ROWS) >= 25
    assert len(NAMED) >= 30
    assert [row for row in ROWS if "::test_" not in row] == [row for row in ROWS if "Load only outputs" in row]
    assert PAGE.count("`test_") == sum(row.count("`test_") for row in ROWS)


def test_how_to_report_is_said_and_linked() -> None:
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert "private vulnerability" in page
    assert "(docs/concepts/security.md)" in page
    assert "(../../SECURITY.md)" in PAGE

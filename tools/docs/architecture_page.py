"""The drawing of floors in docs/concepts/architecture.md.

PYTHONPATH=.:tests/support python tools/docs/architecture_page.py
"""

from __future__ import annotations

import re

from floors import COMPILER, GROUND, PACKAGE, RUNTIME, TOP

PAGE = PACKAGE.parent / "docs/concepts/architecture.md"


def floors() -> str:
    """The drawing: a line per floor, the top one first."""
    column = 44

    def row(left: set[str], right: set[str] | None = None) -> str:
        cells = [" · ".join(sorted(rooms)) for rooms in ((left,) if right is None else (left, right))]
        if right is None:
            return f"│ {cells[0]:^{2 * column + 1}} │"
        return f"│ {cells[0]:^{column - 1}} │ {cells[1]:^{column - 1}} │"

    line = "├" + "─" * (2 * column + 3) + "┤"
    height = max(len(COMPILER), len(RUNTIME))
    runtime = [*RUNTIME, *[set[str]()] * (height - len(RUNTIME))]
    drawn = ["┌" + "─" * (2 * column + 3) + "┐"]
    for floor in reversed(TOP):
        drawn += [row({"rewriter" if room == "__init__" else room for room in floor}), line]
    drawn += [row({"compiler"}, {"runtime"})]
    for left, right in zip(reversed(COMPILER), reversed(runtime), strict=True):
        drawn.append(row(left, right))
    for floor in reversed(GROUND):
        drawn += [line, row(floor)]
    drawn.append("└" + "─" * (2 * column + 3) + "┘")
    return "```text\n" + "\n".join(drawn) + "\n```"


def rendered() -> str:
    """The page as it should be."""
    drawing = f"<!-- floors -->\n{floors()}\n<!-- end -->"
    return re.sub(r"<!-- floors -->.*?<!-- end -->", lambda _: drawing, PAGE.read_text(encoding="utf-8"), flags=re.S)


if __name__ == "__main__":
    PAGE.write_text(rendered(), encoding="utf-8")

"""The generated parts of docs/ARCHITECTURE.md. `python tests/architecture_page.py` writes them anew."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from floors import COMPILER, GROUND, PACKAGE, RUNTIME, TOP

PAGE = PACKAGE.parent / "docs/ARCHITECTURE.md"


def summary(path: Path) -> str:
    """The first sentence of a file's docstring, on one line."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s", text)[0]


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


def files() -> str:
    """A table per room: its files and what each is for."""
    parts = []
    order = [room for floor in [*GROUND, *COMPILER, *RUNTIME, *TOP] for room in sorted(floor)]
    for room in order:
        place = PACKAGE / room
        if not place.is_dir():
            continue
        rows = [f"### {room}/\n", summary(place / "__init__.py") + "\n", "| file | |", "|---|---|"]
        for path in sorted(place.rglob("*.py")):
            name = path.relative_to(place)
            if str(name) != "__init__.py":
                shown = summary(path).replace("|", r"\|")
                rows.append(f"| `{name}` | {shown} |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


def rendered(text: str) -> str:
    """The page with its generated parts as they should be."""
    for name, made in (("floors", floors()), ("files", files())):
        text = re.sub(
            rf"<!-- {name} -->.*?<!-- end -->",
            lambda _, name=name, made=made: f"<!-- {name} -->\n{made}\n<!-- end -->",
            text,
            flags=re.S,
        )
    return text


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"{PAGE} written\n")

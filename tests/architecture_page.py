"""What is generated of docs/concepts/architecture.md and docs/reference/files: `python tests/architecture_page.py`."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Sequence, Set
from pathlib import Path

from floors import COMPILER, GROUND, PACKAGE, RUNTIME, TOP

DOCS = PACKAGE.parent / "docs"
PAGE = DOCS / "concepts/architecture.md"
# Pages of files, from below: a title, what the rooms are for, their floors.
FILES = {
    "common": ("Files of the common rooms", "What both the compiler and the runtime stand on.", GROUND),
    "compiler": ("Files of the compiler", "From a checkpoint to a Program, passes, and what is emitted.", COMPILER[:4]),
    "conversion": ("Files of the conversion", "Inspection, verification, and `rewrite MODEL`.", COMPILER[4:]),
    "runtime": ("Files of the runtime", "What ranks run, training, and emulated clusters.", RUNTIME),
    "commands": ("Files of the commands", "Healing, prediction, search, serving and the command line.", TOP),
}


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


def files(title: str, purpose: str, floors: Sequence[Set[str]]) -> str:
    """A page with a table per room: its files and what each is for."""
    where = "[Architecture](../../concepts/architecture.md) shows how rooms depend on each other."
    parts = [f"# {title}\n\n{purpose} {where}"]
    for room in [room for floor in floors for room in sorted(floor)]:
        place = PACKAGE / room
        if not place.is_dir():
            continue
        rows = [f"## {room}/\n", summary(place / "__init__.py") + "\n", "| file | |", "|---|---|"]
        for path in sorted(place.rglob("*.py")):
            name = path.relative_to(place)
            if str(name) != "__init__.py":
                shown = summary(path).replace("|", r"\|")
                rows.append(f"| `{name}` | {shown} |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


def rendered() -> dict[Path, str]:
    """The pages as they should be."""
    made = {DOCS / f"reference/files/{name}.md": files(*page) for name, page in FILES.items()}
    drawing = f"<!-- floors -->\n{floors()}\n<!-- end -->"
    text = PAGE.read_text(encoding="utf-8")
    return {PAGE: re.sub(r"<!-- floors -->.*?<!-- end -->", lambda _: drawing, text, flags=re.S)} | made


if __name__ == "__main__":
    for page, text in rendered().items():
        page.write_text(text, encoding="utf-8")
        sys.stdout.write(f"{page} written\n")

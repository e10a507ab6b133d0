"""Text of generated code and of the IR, of both sides, on the terminal: `rewrite diff --code --ir`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from rewriter.explain.diff.differences import CodeDifference, PassDifference

_STYLES = {"same": "dim", "removed": "red", "added": "green", "changed": "yellow", "gap": "dim"}


def side_by_side(code: Sequence[CodeDifference], width: int) -> RenderableType:
    """The generated files, changed places next to each other."""
    parts: list[RenderableType] = []
    half = max(20, (width - 15) // 2)
    for each in code:
        if not each.rows:
            continue
        table = Table(box=None, padding=(0, 1), title=each.title, title_justify="left", title_style="bold")
        for title in ("", each.before, "", each.after):
            table.add_column(title, width=5 if not title else half, justify="right" if not title else "left")
        for kind, left, right in each.rows:
            (before, old), (after, new) = (side or ("", "⋯" if kind == "gap" else "") for side in (left, right))
            table.add_row(str(before), escape(old), str(after), escape(new), style=_STYLES[kind])
        parts += [table, Text()]
    return Group(*parts) if parts else Text("The generated code is the same.", "dim")


def ir_difference(passes: Sequence[PassDifference]) -> RenderableType:
    """The changes of every pass in the printed IR."""
    parts: list[RenderableType] = []
    for entry in passes:
        if entry.ir:
            parts += [Text(entry.name, "bold"), Syntax("\n".join(entry.ir), "diff", background_color="default"), Text()]
    return Group(*parts) if parts else Text("The IR is the same after every pass.", "dim")

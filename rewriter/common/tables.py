"""Tables for the terminal in one look: no lines, a bold title at the left, dim headers."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def plain_table(title: str | None = None, gap: int = 2, **look: Any) -> Table:
    """An empty table; `gap`: spaces behind a column; `look`: further arguments of rich's Table."""
    usual = {"title_justify": "left", "title_style": "bold", "caption_justify": "left", "header_style": "bold dim"}
    return Table(title=title, box=None, pad_edge=False, padding=(0, gap, 0, 0), **(usual | look))

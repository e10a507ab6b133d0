"""Tables for the terminal in one look: no lines, a bold title at the left, dim headers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rich.table import Table

WIDE: dict[str, Any] = {"padding": (0, 3, 0, 0), "header_style": "dim"}  # the look of tables without a title


def plain_table(
    title: str | None,
    *columns: str,
    numbers: Collection[str] = (),
    fold: Collection[str] = (),
    whole: Collection[str] = (),
    **look: Any,
) -> Table:
    """An empty table. Columns `numbers` are at the right; too wide cells of columns `fold` break anywhere, those of
    `whole` not at all. `look`: further arguments of rich's Table."""
    usual = {"title_justify": "left", "title_style": "bold", "caption_justify": "left", "header_style": "bold dim"}
    table = Table(title=title, box=None, pad_edge=False, **({"padding": (0, 2, 0, 0)} | usual | look))
    for column in columns:
        table.add_column(
            column,
            justify="right" if column in numbers else "left",
            overflow="fold" if column in fold else "ellipsis",
            no_wrap=column in whole,
        )
    return table

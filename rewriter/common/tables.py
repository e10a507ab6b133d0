"""Tables for the terminal in one look: no lines, a bold title at the left, dim headers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
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


@dataclass(frozen=True)
class FittingTable:
    """A table that leaves out columns until it is no wider than the terminal.

    `rows`: cells by column, in rich's markup; `styles`: one per row, or none. `dropped`: the columns that may be left
    out, the least important first. `wraps`: the columns whose cells may be broken, each with the width in characters
    below which other columns are left out instead. `headers`: other headers than the columns' names. `look`: further
    arguments of `plain_table`.
    """

    columns: Sequence[str]
    rows: Sequence[Mapping[str, str]]
    dropped: Sequence[str] = ()
    wraps: Mapping[str, int] = field(default_factory=dict)
    title: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    styles: Sequence[str] = ()
    look: Mapping[str, Any] = field(default_factory=dict)

    def kept(self, console: Console, options: ConsoleOptions) -> list[str]:
        """The columns that have room."""
        unlimited = options.update(width=10_000)
        for count in range(len(self.dropped) + 1):
            kept = [column for column in self.columns if column not in self.dropped[:count]]
            if Measurement.get(console, unlimited, self._table(kept, self.wraps)).maximum <= options.max_width:
                break
        return kept

    def _table(self, kept: Sequence[str], limits: Mapping[str, int]) -> Table:
        headers = {column: self.headers.get(column, column) for column in kept}
        look = dict(self.look)
        numbers = {headers[name] for name in look.pop("numbers", ()) if name in kept}
        fold = {headers[name] for name in self.wraps if name in kept}
        whole = {*headers.values()} - fold
        table = plain_table(self.title, *headers.values(), numbers=numbers, fold=fold, whole=whole, **look)
        for column, name in zip(table.columns, kept, strict=True):
            column.max_width = limits.get(name)
        styles = self.styles or [""] * len(self.rows)
        for cells, style in zip(self.rows, styles, strict=True):
            table.add_row(*(cells.get(name, "") for name in kept), style=style)
        return table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._table(self.kept(console, options), {})

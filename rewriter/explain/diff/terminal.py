"""Differences as tables of the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from rewriter.common.numbers import digits
from rewriter.common.tables import WIDE, plain_table
from rewriter.explain.diff.differences import (
    CodeDifference,
    Differences,
    PassDifference,
    TensorDifferences,
    norm_text,
    wired_cells,
)  # fmt: skip

_MOST = 20  # lines of a list


def tables(found: Differences) -> RenderableType:
    """Everything but code, of which the counts."""
    parts: list[RenderableType] = [_facts(found)]
    if found.passes:
        parts += [Text(), _passes(found.passes)]
    if found.layers:
        parts += [Text(), _layers(found)]
    parts += [Text(), _code(found.code)]
    if found.tensors is not None:
        parts += [Text(), *_tensors(found.tensors)]
    parts += [Text(note, "dim") for note in found.notes]
    if found.same:
        parts += [Text(), Text("Nothing differs.", "bold")]
    return Group(*parts)


def _facts(found: Differences) -> Table:
    table = plain_table(None, "", found.before, found.after, **WIDE)
    for name, (before, after) in found.known_facts.items():
        table.add_row(name, escape(before), escape(after) if before == after else f"[bold]{escape(after)}[/]")
    return table


def _passes(passes: Sequence[PassDifference]) -> Table:
    table = plain_table(None, "pass", "what it did to the IR", whole=("pass",), **WIDE)
    for entry in passes:
        where = "" if entry.where == "both" else f"only in {entry.where}: "
        table.add_row(f"[bold]{escape(entry.name)}[/]", escape(where + entry.summary))
        changes = entry.changes
        if entry.reads:
            changes.append(f"{len(entry.reads)} blocks read other values")
        if " | " in entry.options:
            changes.append(f"options: {entry.options}")
        if changes:
            table.add_row("", f"[dim]{escape(', '.join(changes[:8]))}{' …' if len(changes) > 8 else ''}[/]")
    return table


def _layers(found: Differences) -> Table:
    table = plain_table(None, "layers", "", "reads", "collectives", "bytes/token", whole=("layers",), **WIDE)
    for layer in found.layers:
        before, after = ([escape(cell) for cell in wired_cells(side)] for side in (layer.before, layer.after))
        if layer.same:
            table.add_row(layer.name, "same", *before)
        else:
            table.add_row(layer.name, escape(found.before), *before, style="dim")
            table.add_row("", escape(found.after), *after)
    return table


def _code(code: Sequence[CodeDifference]) -> Table:
    table = plain_table(None, "generated code", "", whole=("generated code",), **WIDE)
    for each in code:
        changes = f"[green]+{each.added}[/] [red]−{each.removed}[/] lines" if each.rows else "same"
        table.add_row(each.title, changes)
    return table


def side_by_side(code: Sequence[CodeDifference], width: int) -> RenderableType:
    """The generated files, changed places beside each other."""
    parts: list[RenderableType] = []
    half = max(20, (width - 15) // 2)
    for each in code:
        if not each.rows:
            continue
        table = Table(box=None, padding=(0, 1), title=each.title, title_justify="left", title_style="bold")
        for title in ("", each.before, "", each.after):
            table.add_column(title, width=5 if not title else half, justify="right" if not title else "left")
        for kind, left, right in each.rows:
            if kind == "gap":
                table.add_row("", "[dim]⋯[/]", "", "[dim]⋯[/]")
                continue
            style = {"same": "dim", "removed": "red", "added": "green", "changed": "yellow"}[kind]
            (before, old), (after, new) = (side or ("", "") for side in (left, right))
            table.add_row(str(before), escape(old), str(after), escape(new), style=style)
        parts += [table, Text()]
    return Group(*parts) if parts else Text("The generated code is the same.", "dim")


def ir_difference(passes: Sequence[PassDifference]) -> RenderableType:
    """What every pass changed in the printed IR."""
    parts: list[RenderableType] = []
    for entry in passes:
        if entry.ir:
            parts += [Text(entry.name, "bold"), Syntax("\n".join(entry.ir), "diff", background_color="default"), Text()]
    return Group(*parts) if parts else Text("The IR is the same after every pass.", "dim")


def _tensors(found: TensorDifferences) -> list[RenderableType]:
    table = plain_table(None, "tensors", "", whole=("tensors",), **WIDE)
    table.add_row("same", f"{found.same:,} ({digits(found.same_bytes / 1e6)} MB)")
    for name, count in found.counts.items():
        table.add_row(name, f"{count:,}")
    parts: list[RenderableType] = [table]
    if found.changed:
        columns = ("changed", "what", "‖before‖", "‖after‖", "‖after − before‖")
        changed = plain_table(None, *columns, numbers=columns[2:], fold=("changed",), **WIDE)
        for each in found.changed[:_MOST]:
            kinds = "" if each.before == each.after else f" ({each.before} → {each.after})"
            norms = map(norm_text, (each.norm_before, each.norm_after, each.norm_difference))
            changed.add_row(escape(each.name), escape(each.what + kinds), *norms)
        if len(found.changed) > _MOST:
            changed.add_row(f"… {len(found.changed) - _MOST} more (--json, --html: all)", "", "", "", "")
        parts += [Text(), changed]
    for before, after in found.renamed[:_MOST]:
        parts.append(Text(f"renamed: {before} → {after}"))
    for title, names in (("removed", found.removed), ("added", found.added)):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            parts.append(Text(f"{title}: {', '.join(names[:5])}{more}"))
    return parts

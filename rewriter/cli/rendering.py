"""A conversion's report as tables. Renders the report's JSON, so the two can never differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rewriter.common.tables import WIDE, plain_table


def print_report(text: str, *, dry_run: bool = False) -> None:
    """Print the JSON of a report as tables: the passes, the verification, the communication before and after."""
    report: dict[str, Any] = json.loads(text)
    console = Console(highlight=False)
    console.print(
        f"[bold]{escape(str(report['model']))}[/] → [bold]{escape(_value(report['recipe']))}[/]"
        + (f" on {escape(_value(report['mesh']))}\n" if report.get("mesh") else "\n")
    )
    console.print(_passes(report.get("passes") or []))
    for title in ("verification", "communication"):
        if content := report.get(title):
            sides = all(isinstance(content.get(side), Mapping) for side in ("before", "after"))
            console.print()
            console.print((comparison if sides else facts)(title, content))
    verb = "would write" if dry_run else "wrote"
    count = len(report.get("files") or [])
    console.print(f"\n{verb} [bold]{escape(str(report['out']))}[/]" + (f", {count} files" if count else ""))


def print_adaptation(text: str) -> None:
    """Print the JSON of `rewrite adapt`'s report as tables: what was done, and the losses."""
    report: dict[str, Any] = json.loads(text)
    done, console = report["adaptation"], Console(highlight=False)
    what = {name: done[name] for name in ("method", "data", "steps", "tokens", "seconds")}
    what["data"] = {"source": done["data"]} | {name: count for name, count in done["counts"].items() if count}
    console.print(facts("fine-tuning", what))
    console.print()
    console.print(facts("loss (nats per target)", report["losses"]))
    console.print(f"[dim]on {escape(str(done['evaluation']))}[/]")
    console.print(f"\nwrote [bold]{escape(str(report['out']))}[/]")


def print_verification(verification: Mapping[str, Any]) -> None:
    """Print the checks of `rewrite verify`."""
    Console(highlight=False).print(facts("verification", verification))


def facts(title: str, content: Mapping[str, Any]) -> Table:
    """Names and values, nested mappings spelt `outer.inner`."""
    table = plain_table(None, title, "", whole=(title,), **WIDE)
    for name, value in _flat(content):
        table.add_row(name, escape(_value(value)))
    return table


def comparison(title: str, content: Mapping[str, Any]) -> Table:
    """`{"before": {...}, "after": {...}}` side by side."""
    sides = ("before", "after")
    table = plain_table(None, title, *sides, numbers=sides, whole=(title,), **WIDE)
    before, after = dict(_flat(content["before"])), dict(_flat(content["after"]))
    for name in dict.fromkeys((*before, *after)):
        table.add_row(name, *(escape(_value(side[name])) if name in side else "–" for side in (before, after)))
    return table


def _passes(passes: Sequence[Mapping[str, Any]]) -> Table:
    table = plain_table(None, "pass", "kind", "what it did", whole=("pass",), **WIDE)
    for entry in passes:
        table.add_row(f"[bold]{escape(entry['name'])}[/]", escape(entry["kind"]), escape(str(entry["summary"])))
        for note in entry.get("notes") or []:
            table.add_row("", "", f"[dim]{escape(str(note))}[/]")
    return table


def _flat(content: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in content.items():
        name = f"{prefix}{key}".replace("_", " ")
        rows += _flat(value, f"{name}.") if isinstance(value, Mapping) else [(name, value)]
    return rows


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return str(value.get("name") or ", ".join(f"{key} {_value(inner)}" for key, inner in value.items()))
    if isinstance(value, list):
        return ", ".join(_value(item) for item in value)
    return "–" if value is None else str(value)

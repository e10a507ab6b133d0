"""A conversion's report as tables. Renders the report's JSON, so the two can never differ."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rewriter.common.tables import WIDE, FittingTable, plain_table


def print_report(text: str, *, verbose: bool = False) -> None:
    """Print the JSON of a report as tables: the passes, the verification, the communication, the verdict.

    `verbose`: with routine passes that found nothing to change, and the notes of routine passes.
    """
    report: dict[str, Any] = json.loads(text)
    console = Console(highlight=False)
    console.print(
        f"[bold]{escape(str(report['model']))}[/] → [bold]{escape(_value(report['recipe']))}[/]"
        + (f" on {escape(_value(report['mesh']))}\n" if report.get("mesh") else "\n")
    )
    console.print(_passes(report.get("passes") or [], verbose))
    for title in ("verification", "communication"):
        if content := report.get(title):
            sides = all(isinstance(content.get(side), Mapping) for side in ("before", "after"))
            console.print()
            told = [content[key] for key in content if NOTE.fullmatch(key)]
            content = {key: value for key, value in content.items() if not NOTE.fullmatch(key)}
            console.print((comparison if sides else facts)(title, content))
            for note in told:
                console.print(f"[dim]{escape(str(note))}[/]")
    for note in report.get("notes") or []:
        if verbose or " was not applied: " not in note:
            console.print(f"\n[dim]{escape(note)}[/]")
    verb = "would write" if report.get("dry_run") else "wrote"
    count = len(report.get("files") or [])
    console.print(f"\n{verb} [bold]{escape(str(report['out']))}[/]" + (f", {count} files" if count else ""))
    print_verdict(console, report)


def print_adaptation(text: str) -> None:
    """Print the JSON of `rewrite adapt`'s report as tables: what was done, the losses, the verdict."""
    report: dict[str, Any] = json.loads(text)
    done, console = report["adaptation"], Console(highlight=False)
    what = {name: done[name] for name in ("method", "data", "steps", "tokens", "seconds")}
    what["data"] = {"source": done["data"]} | {name: count for name, count in done["counts"].items() if count}
    console.print(facts("fine-tuning", what))
    console.print()
    console.print(facts("loss (nats per target)", {LOSSES.get(k, k): loss for k, loss in report["losses"].items()}))
    console.print(f"[dim]on {escape(str(done['evaluation']))}[/]")
    console.print(f"\nwrote [bold]{escape(str(report['out']))}[/]")
    print_verdict(console, report)


NOTE = re.compile(r"note( \d+)?")  # of a verification: sentences, as wide as the terminal
LOSSES = {"original": "of the original", "before": "rewritten, before training", "after": "after training"}


def print_verdict(console: Console, report: Mapping[str, Any]) -> None:
    """Print `verdict` and `next` of a report's data, as its last lines."""
    if said := report.get("verdict"):
        console.print(Text(f"\n{said}", "bold"))
    print_next(console, report.get("next") or "")


def print_next(console: Console, command: str) -> None:
    """Print the next command, if there is one, on one line whatever its length."""
    if command:
        console.print(Text(f"Next: {command}"), soft_wrap=True)


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


def _passes(passes: Sequence[Mapping[str, Any]], verbose: bool) -> FittingTable:
    rows = []
    for entry in passes:
        routine = entry.get("routine", False)
        if verbose or entry.get("fired", True) or not routine:
            name = f"[bold]{escape(entry['name'])}[/]"
            rows.append({"pass": name, "kind": escape(entry["kind"]), "what it did": escape(str(entry["summary"]))})
        if verbose or not routine:
            rows += [{"what it did": f"[dim]{escape(str(note))}[/]"} for note in entry.get("notes") or []]
    return FittingTable(("pass", "kind", "what it did"), rows, wraps={"what it did": 44}, look=WIDE)


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

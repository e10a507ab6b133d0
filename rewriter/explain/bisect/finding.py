"""Result of a bisection: the place where two computations part, as JSON and on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.syntax import Syntax
from rich.text import Text

from rewriter.common.numbers import json_text
from rewriter.common.tables import WIDE, plain_table


@dataclass(frozen=True)
class Fault:
    """The place where they part.

    `stage` is the pass, or what else made it: "tracing", "weights", "adapted checkpoint", "sharded module". `layer` is
    None outside of the layers, `module` a path, empty between modules. `statement` is the first statement of the IR,
    the line of code or the tensor that is wrong. `cause` says what is known beyond that. `difference` is a unified
    diff, from before the pass, or from what should be written, to what is there. `error` is relative.
    """

    stage: str
    layer: int | None = None
    module: str = ""
    statement: str = ""
    cause: str = ""
    difference: Sequence[str] = ()
    error: float | None = None


@dataclass(frozen=True)
class Step:
    """One stage that was compared: its relative error, None where it was compared otherwise, and whether it held."""

    name: str
    held: bool
    error: float | None = None
    note: str = ""


@dataclass
class Bisection:
    """Report of `rewrite bisect`. `fault` is None where nothing parts; `on` says which weights were run."""

    what: str
    on: str = ""
    steps: list[Step] = field(default_factory=list)
    fault: Fault | None = None
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """The report as JSON."""
        return json_text(asdict(self), indent=2, default=str)

    def __rich__(self) -> RenderableType:
        table, fault = plain_table(None, self.what, "", "", whole=(self.what,), numbers=("",), **WIDE), self.fault
        for step in self.steps:
            mark = "[green]same[/]" if step.held else "[red]parts[/]"
            note = f"  [dim]{escape(step.note)}[/]" if step.note else ""
            table.add_row(escape(step.name), _error(step.error), mark + note)
        notes = [Text(note, "dim") for note in self.notes]
        if fault is None:
            return Group(table, Text(), Text("Nothing parts: every stage computes what it should.", "bold"), *notes)
        facts = {
            "layer": "outside of the layers" if fault.layer is None else str(fault.layer),
            "module": fault.module,
            "statement": fault.statement,
            "relative error": _error(fault.error),
            "why": fault.cause,
        }
        place = plain_table(None, "they part in", fault.stage, whole=("they part in",), **WIDE)
        for name, value in facts.items():
            if value:
                place.add_row(name, escape(value))
        changed: list[RenderableType] = []
        if fault.difference:
            changed = [Text(), Syntax("\n".join(fault.difference), "diff", background_color="default"), Text()]
        return Group(table, Text(), place, *changed, *notes)


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"

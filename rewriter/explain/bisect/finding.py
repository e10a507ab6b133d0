"""What a bisection found: where two computations part, in words, as JSON and on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from rewriter.common.numbers import json_text
from rewriter.common.tables import WIDE, plain_table


@dataclass(frozen=True)
class Fault:
    """Where they part.

    `stage` is the pass, or what else made it: "tracing", "weights", "adapted checkpoint", "sharded module". `layer` is
    None outside of the layers. `operator` is the operation, `module` the path of what it belongs to, `node` its name
    in the IR. `actual` and `expected` are its statements, or what else can be set side by side. `cause` says in a
    sentence what is wrong; `others` are operators that could not be told from it.
    """

    stage: str
    layer: int | None
    operator: str
    module: str
    cause: str
    node: str = ""
    actual: str = ""
    expected: str = ""
    error: float | None = None
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """One stage that was compared: its relative error, None where it was compared otherwise, and whether it held."""

    name: str
    held: bool
    error: float | None = None
    note: str = ""


@dataclass
class Bisection:
    """What `rewrite bisect` reports. `fault` is None where nothing parts; `on` says which weights were run."""

    what: str
    on: str = ""
    steps: list[Step] = field(default_factory=list)
    fault: Fault | None = None
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """The report as JSON."""
        return json_text(asdict(self), indent=2, default=str)

    def sentence(self) -> str:
        """The result in a sentence."""
        fault = self.fault
        if fault is None:
            return "Nothing parts: every stage computes what it should."
        where = f"layer {fault.layer}" if fault.layer is not None else "outside of the layers"
        module = f" ({fault.module})" if fault.module and fault.module not in fault.operator else ""
        return f"They part in {fault.stage}, {where}, at {fault.operator}{module}: {fault.cause}"

    def __rich__(self) -> RenderableType:
        table = plain_table(None, self.what, "", "", whole=(self.what,), numbers=("",), **WIDE)
        for step in self.steps:
            mark = "[green]same[/]" if step.held else "[red]parts[/]"
            error = "" if step.error is None else f"{step.error:.1e}"
            table.add_row(escape(step.name), error, mark + (f"  [dim]{escape(step.note)}[/]" if step.note else ""))
        parts: list[RenderableType] = [table, Text()]
        if self.fault is None:
            parts.append(Text(self.sentence(), "bold"))
        else:
            parts += [_facts(self.fault)]
        parts += [Text(note, "dim") for note in self.notes]
        return Group(*parts)


def _facts(fault: Fault) -> RenderableType:
    table = plain_table(None, "they part in", fault.stage, whole=("they part in",), **WIDE)
    rows: Sequence[tuple[str, Any]] = [
        ("layer", "outside of the layers" if fault.layer is None else fault.layer),
        ("operator", fault.operator),
        ("module", fault.module),
        ("node", fault.node),
        ("is", fault.actual),
        ("should be", fault.expected),
        ("relative error", None if fault.error is None else f"{fault.error:.1e}"),
        ("not told apart from", ", ".join(fault.others)),
        ("why", fault.cause),
    ]
    for name, value in rows:
        if value not in ("", None):
            table.add_row(name, escape(str(value)))
    return table

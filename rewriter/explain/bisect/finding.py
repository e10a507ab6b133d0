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

    def sentence(self) -> str:
        """The result in a sentence."""
        fault = self.fault
        if fault is None:
            return "Nothing parts: every stage computes what it should."
        where = f"layer {fault.layer}" if fault.layer is not None else "outside of the layers"
        parts = (fault.module, fault.statement, fault.cause)
        return f"They part in {fault.stage}, {where}: {'; '.join(filter(None, parts))}"

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
            fault = self.fault
            facts = {
                "layer": "outside of the layers" if fault.layer is None else str(fault.layer),
                "module": fault.module,
                "statement": fault.statement,
                "relative error": "" if fault.error is None else f"{fault.error:.1e}",
                "why": fault.cause,
            }
            table = plain_table(None, "they part in", fault.stage, whole=("they part in",), **WIDE)
            for name, value in facts.items():
                if value:
                    table.add_row(name, escape(value))
            parts.append(table)
            if fault.difference:
                parts += [Text(), Syntax("\n".join(fault.difference), "diff", background_color="default"), Text()]
        parts += [Text(note, "dim") for note in self.notes]
        return Group(*parts)

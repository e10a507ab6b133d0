"""Report of `rewrite diff`: plain data for JSON, and the tables that the terminal and the page print of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from rewriter.common.numbers import digits, json_text
from rewriter.common.tables import WIDE, FittingTable
from rewriter.explain.plan_table import reads
from rewriter.ir.layer_plan import LayerGroup, relative
from rewriter.show.page import render

_MOST = 20  # rows of a table on the terminal
_DROPPED = ("bytes per token",)  # of the table of layers
Row = tuple[str, tuple[int, str] | None, tuple[int, str] | None]
"""(kind, line before, line after): lines are (number, text), None where a side has no such line."""


@dataclass(frozen=True)
class PassDifference:
    """Effect of one pass on the IR.

    `where` is "both", or the side that alone has the pass. `operators` counts calls by operator, [before, after] the
    pass, of those whose number changed. `reads` are the blocks that read other values of the stream after it. `ir` is
    a unified diff of the printed IR; of two outputs, where both have the pass, from the first to the second one's.
    """

    name: str
    kind: str
    summary: str
    where: str
    operators: Mapping[str, tuple[int, int]]
    reads: Sequence[str]
    ir: Sequence[str]
    options: str = ""


@dataclass(frozen=True)
class LayerDifference:
    """Layers `first` to `last`, which on each side are wired like each other."""

    first: int
    last: int
    before: LayerGroup
    after: LayerGroup

    @property
    def same(self) -> bool:
        """True where both read and communicate the same; where an add runs, in a layer or the next, may differ."""
        then, now = (replace(relative(side.plan), crosses=()) for side in (self.before, self.after))
        return then == now


@dataclass(frozen=True)
class CodeDifference:
    """A generated file of both sides, line by line. The kind of a row is "same", "changed", "added", "removed" or "gap"
    (same lines left out)."""

    title: str
    before: str
    after: str
    rows: Sequence[Row]
    added: int
    removed: int


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that changed: ‖before‖, ‖after‖ and ‖after − before‖ (Frobenius), None where shapes differ."""

    name: str
    before: str
    after: str
    norm_before: float | None
    norm_after: float | None
    norm_difference: float | None
    what: str

    @property
    def norms(self) -> list[str]:
        """The three norms with four digits."""
        norms = (self.norm_before, self.norm_after, self.norm_difference)
        return ["–" if norm is None else f"{norm:.4g}" for norm in norms]


@dataclass(frozen=True)
class TensorDifferences:
    """`same` tensors have equal bits and names, `renamed` equal bits and other names (before, after)."""

    same: int
    same_bytes: int
    renamed: Sequence[tuple[str, str]]
    changed: Sequence[TensorDifference]
    removed: Sequence[str]
    added: Sequence[str]

    def sections(self) -> Iterator[Section]:
        counts = [(name, f"{len(getattr(self, name)):,}") for name in ("renamed", "changed", "removed", "added")]
        same = ("same", f"{self.same:,} ({digits(self.same_bytes / 1e6)} MB)")
        yield Section(("tensors", ""), [same, *(row for row in counts if row[1] != "0")])
        changed = []
        for t in self.changed:
            kinds = "" if t.before == t.after else f" ({t.before} → {t.after})"
            changed.append((t.name, t.what + kinds, *t.norms))
        yield Section(("changed", "what", "‖before‖", "‖after‖", "‖after − before‖"), changed)
        yield Section(("renamed from", "to"), self.renamed)
        yield Section(("removed",), [(name,) for name in self.removed])
        yield Section(("added",), [(name,) for name in self.added])


@dataclass(frozen=True)
class Section:
    """A table of the report. `dropped`: columns that a narrow terminal leaves out, the least important first."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    dropped: Sequence[str] = ()

    def table(self, most: int) -> FittingTable:
        """The first `most` rows for the terminal."""
        places = [str(place) for place in range(len(self.columns))]  # two columns may have one name
        rows = [dict(zip(places, map(escape, row), strict=False)) for row in self.rows[:most]]
        if (more := len(self.rows) - most) > 0:
            rows.append({"0": f"… {more} more (--json, --html: all)"})
        dropped = [places[list(self.columns).index(name)] for name in self.dropped]
        headers = dict(zip(places, self.columns, strict=True))
        return FittingTable(places, rows, dropped, dict.fromkeys(places, 40), headers=headers, look=WIDE)


@dataclass
class DiffReport:
    """All differences. `before` and `after` name the sides; `drawings` are SVG, one of each."""

    before: str
    after: str
    facts: Mapping[str, tuple[str, str]]
    passes: Sequence[PassDifference]
    layers: Sequence[LayerDifference]
    code: Sequence[CodeDifference]
    tensors: TensorDifferences | None
    notes: list[str] = field(default_factory=list)
    drawings: tuple[str, str] = ("", "")

    @property
    def same(self) -> bool:
        """True where nothing differs."""
        t = self.tensors
        moved = t is not None and bool(t.renamed or t.changed or t.removed or t.added)
        changed = any(p.operators or p.reads or p.ir or p.options for p in self.passes)
        return not (moved or changed or any(not x.same for x in self.layers) or any(c.rows for c in self.code))

    def sections(self) -> list[Section]:
        """The tables that have rows: everything but the text of code and IR."""
        known = [(name, *values) for name, values in self.facts.items() if values != ("–", "–")]
        code = [(c.title, f"+{c.added} −{c.removed} lines" if c.rows else "same") for c in self.code]
        sections = [
            Section(("", self.before, self.after), known),
            Section(("pass", "what it did to the IR"), list(_pass_rows(self.passes))),
            Section(("layers", "", "reads", "collectives", "bytes per token"), list(self._layer_rows()), _DROPPED),
            Section(("generated code", ""), code),
            *(self.tensors.sections() if self.tensors is not None else ()),
        ]
        return [section for section in sections if section.rows]

    def _layer_rows(self) -> Iterator[Sequence[str]]:
        for layer in self.layers:
            name = str(layer.first) if layer.first == layer.last else f"{layer.first}–{layer.last}"
            if layer.same:
                yield name, "same", *_wired(layer.before)
            else:
                yield name, self.before, *_wired(layer.before)
                yield "", self.after, *_wired(layer.after)

    def to_json(self) -> str:
        """The report as JSON, without drawings."""
        data: dict[str, Any] = {"same": self.same} | asdict(self)
        del data["drawings"]
        for layer, entry in zip(self.layers, data["layers"], strict=True):
            entry |= {"before": layer.before.to_dict(), "after": layer.after.to_dict(), "same": layer.same}
        return json_text(data, indent=2)

    def to_html(self) -> str:
        """The report as one page that needs no network, no script and no other file; the same differences give the
        same bytes."""
        return render("diff.html.j2", title=f"{self.before} | {self.after}", report=self)

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = []
        for section in self.sections():
            parts += [section.table(_MOST), Text()]
        parts += [Text(note, "dim") for note in self.notes]
        return Group(*parts, *([Text("Nothing differs.", "bold")] if self.same else []))

    def _repr_html_(self) -> str:
        return "".join(f"<div>{drawing}</div>" for drawing in self.drawings)


def _pass_rows(passes: Sequence[PassDifference]) -> Iterator[Sequence[str]]:
    for p in passes:
        yield p.name, ("" if p.where == "both" else f"only in {p.where}: ") + p.summary
        changes = [f"{name} {a} → {b}" for name, (a, b) in p.operators.items()]
        changes += [f"{len(p.reads)} blocks read other values"] if p.reads else []
        changes += [f"options: {p.options}"] if p.options else []
        if changes:
            yield "", ", ".join(changes)


def _wired(layers: LayerGroup) -> tuple[str, str, str]:
    """Cells of a layer's row: reads, collectives, bytes per token."""
    plan = layers.plan
    hidden = f", {plan.hidden} hidden" if plan.hidden else ""
    by_block = ", ".join(f"{block.name}: {reads(block)}" for block in layers.blocks)
    return by_block, f"{plan.collectives}{hidden}", f"{plan.bytes_per_token:,}"

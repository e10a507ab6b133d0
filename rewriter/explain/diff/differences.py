"""Report of `rewrite diff` as plain data: the terminal, the JSON and the page are made from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rewriter.common.numbers import json_text
from rewriter.explain.plan_table import reads
from rewriter.ir.layer_plan import LayerGroup, relative

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

    @property
    def changes(self) -> list[str]:
        """The operators whose number changed: `all_reduce 0 → 9`."""
        return [f"{name} {a} → {b}" for name, (a, b) in self.operators.items()]


@dataclass(frozen=True)
class LayerDifference:
    """Layers `first` to `last`, which are wired alike on each side."""

    first: int
    last: int
    before: LayerGroup
    after: LayerGroup

    @property
    def same(self) -> bool:
        """True where both read and communicate the same; where an add runs, in a layer or the next, may differ."""
        then, now = (replace(relative(side.plan), crosses=()) for side in (self.before, self.after))
        return then == now

    @property
    def name(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}–{self.last}"


@dataclass(frozen=True)
class CodeDifference:
    """One generated file beside another. The kind of a row is "same", "changed", "added", "removed" or "gap" (same
    lines left out)."""

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


@dataclass(frozen=True)
class TensorDifferences:
    """`same` tensors have equal bits and names, `renamed` equal bits and other names (before, after)."""

    same: int
    same_bytes: int
    renamed: Sequence[tuple[str, str]]
    changed: Sequence[TensorDifference]
    removed: Sequence[str]
    added: Sequence[str]

    @property
    def counts(self) -> dict[str, int]:
        """Number of tensors that are not the same, by kind of difference."""
        lists = {"renamed": self.renamed, "changed": self.changed, "removed": self.removed, "added": self.added}
        return {name: len(tensors) for name, tensors in lists.items() if tensors}


@dataclass
class Differences:
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
    def known_facts(self) -> dict[str, tuple[str, str]]:
        """The facts that are known of a side."""
        return {name: values for name, values in self.facts.items() if values != ("–", "–")}

    @property
    def same(self) -> bool:
        """True where nothing differs."""
        moved = self.tensors is not None and bool(self.tensors.counts)
        changed = any(p.operators or p.reads or p.ir or p.options for p in self.passes)
        return not (moved or changed or any(not x.same for x in self.layers) or any(c.rows for c in self.code))

    def to_json(self) -> str:
        """The report as JSON, without drawings."""
        data: dict[str, Any] = {"same": self.same} | asdict(self)
        del data["drawings"]
        for layer, entry in zip(self.layers, data["layers"], strict=True):
            entry |= {"before": layer.before.to_dict(), "after": layer.after.to_dict(), "same": layer.same}
        return json_text(data, indent=2)

    def _repr_html_(self) -> str:
        return "".join(f"<div>{drawing}</div>" for drawing in self.drawings)


def wired_cells(layers: LayerGroup) -> tuple[str, str, str]:
    """Cells of a table of layers: reads, collectives, bytes per token."""
    plan = layers.plan
    hidden = f", {plan.hidden} hidden" if plan.hidden else ""
    by_block = ", ".join(f"{block.name}: {reads(block)}" for block in layers.blocks)
    return by_block, f"{plan.collectives}{hidden}", f"{plan.bytes_per_token:,}"


def norm_text(value: float | None) -> str:
    """A norm with four digits."""
    return "–" if value is None else f"{value:.4g}"

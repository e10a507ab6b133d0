"""What `rewrite diff` reports, as plain data: the terminal, the JSON and the page are made from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rewriter.analysis.layer_wiring import WiredLayers
from rewriter.common.numbers import json_text


@dataclass(frozen=True)
class PassDifference:
    """What one pass did to the IR.

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
    """Layers `first` to `last`, which are wired alike on each side."""

    first: int
    last: int
    before: WiredLayers
    after: WiredLayers

    @property
    def same(self) -> bool:
        return _wiring(self.before) == _wiring(self.after)


@dataclass(frozen=True)
class CodeDifference:
    """One generated file beside another: rows of (line number, text) on each side, None where one has no such line.

    `kind` of a row is "same", "changed", "added", "removed" or "gap" (same lines left out).
    """

    title: str
    before: str
    after: str
    rows: Sequence[tuple[str, tuple[int, str] | None, tuple[int, str] | None]]
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


@dataclass
class Differences:
    """All of it. `before` and `after` name the sides; `drawings` are SVG, one of each."""

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
        """Whether nothing differs."""
        tensors = self.tensors
        moved = tensors is not None and any((tensors.renamed, tensors.changed, tensors.removed, tensors.added))
        changed = any(p.operators or p.reads or p.ir or p.options for p in self.passes)
        return not (moved or changed or any(not x.same for x in self.layers) or any(c.rows for c in self.code))

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, without drawings."""
        found = asdict(self)
        del found["drawings"]
        for layer, entry in zip(self.layers, found["layers"], strict=True):
            entry["same"] = layer.same
        return found

    def to_json(self) -> str:
        """The report as JSON."""
        return json_text({"same": self.same} | self.to_dict(), indent=2)

    def _repr_html_(self) -> str:
        return "".join(f"<div>{drawing}</div>" for drawing in self.drawings)


def _wiring(layers: WiredLayers) -> Any:
    return layers.blocks, layers.collectives, layers.hidden, layers.bytes_per_token

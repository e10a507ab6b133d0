"""Program: the IR. Immutable; passes return new ones. `rewriter.ir.structure` says what it consists of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from rewriter.ir.printing import program_html, program_text
from rewriter.ir.structure import ProgramData, copy_graph


@dataclass(frozen=True)
class Program(ProgramData):
    """An immutable model program. `origin` is the program as traced, before the first pass.

    `asked` are the passes of the recipe that were applied, as it asks for them (`history` has what each recorded); None
    where passes were applied by hand.
    """

    recipe: Mapping[str, Any] | None = None
    asked: tuple[Any, ...] | None = None
    origin: Program | None = field(default=None, repr=False)

    def edit(self) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
        """A copy of the wiring to change, and the map from old nodes to new ones."""
        return copy_graph(self.graph)

    def with_(self, **changes: Any) -> Program:
        return replace(self, **changes)

    def layer_path(self, index: int) -> str:
        return f"{self.source.layers}.{index}"

    def fingerprint(self) -> str:
        """SHA-256 over the printed IR and the shapes: equal programs print and shard alike."""
        digest = hashlib.sha256(self.text(full=True).encode())
        digest.update(json.dumps({k: v.shape for k, v in self.parameters.items()}, default=list).encode())
        return digest.hexdigest()

    def text(self, full: bool = False) -> str:
        """The IR as text. Layers that print alike are folded unless `full`."""
        return program_text(self, fold=not full)

    def print_ir(self, full: bool = False) -> None:
        """Print the IR: the wiring with alike layers folded, then each distinct body once."""
        print(self.text(full))

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        mesh = " ".join(f"{k}={v}" for k, v in self.mesh.items()) or "one device"
        passes = " → ".join(r.name for r in self.history) or "as traced"
        return f"<Program {self.source.model_type}, {self.source.num_layers} layers, {mesh}, {passes}>"

    def _repr_html_(self) -> str:
        return program_html(self)

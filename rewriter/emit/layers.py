"""Decoder layers printed from the wiring: which values cross from layer to layer, and each layer's statements.

Which values cross is plain liveness over the wiring: at the entry of layer i, everything that was computed before it
and is read in it or after it. No rewrite is treated specially.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from rewriter import ops
from rewriter.analysis.residual import residual_blocks
from rewriter.common.errors import RewriterError
from rewriter.emit.naming import Names
from rewriter.emit.python import bracketed, call_parts, operands
from rewriter.ir import Program
from rewriter.ir.marks import in_stream, marks, stream_index

_INDENT = 8  # statements of a method


@dataclass(frozen=True)
class PrintedLayer:
    """The forward of one layer. `statements` are (variable, text) with the indentation of a method's body.

    `takes` are the variables of the values it is handed, `gives` those that it hands on: the newest value first.
    `stream_given` says of each value given how many blocks old it is (0: the stream itself; None: not a stream value).
    """

    takes: tuple[str, ...]
    gives: tuple[str, ...]
    statements: tuple[tuple[str, str], ...]
    stream_given: tuple[int | None, ...] = ()

    def same_computation(self, other: PrintedLayer) -> bool:
        """Whether both compute alike, whatever else they hand on."""
        return self.statements == other.statements and self.gives[0] == other.gives[0]

    def text(self, values: int | None) -> str:
        """The body of `forward`: split what was packed, compute, pack.

        `values` is the length of the tuple that the source's layer returns, None where it returns the hidden state
        alone. Whatever stands after the hidden state there (attention weights) is None here.
        """
        pad = " " * _INDENT
        hidden = self.takes[0]
        head, tail = ("return ", "") if values is None else ("return (", f"{', None' * (values - 1) or ','})")
        lines = []
        if len(self.takes) > 1:
            lines.append(f"{pad}{', '.join(self.takes)} = {hidden}.chunk({len(self.takes)}, dim=-1)")
        lines += [text for _, text in self.statements]
        if len(self.gives) > 1:
            packed = f"torch.cat(({', '.join(self.gives)}), dim=-1)"
            lines.append(f"{pad}{head}{packed}{tail}")
        elif values is None and self.statements and self.statements[-1][0] == self.gives[0]:
            lines[-1] = lines[-1].replace(f"{self.gives[0]} = ", "return ", 1)
        else:
            lines.append(f"{pad}{head}{self.gives[0]}{tail}")
        return "\n".join(lines)


def print_layers(program: Program) -> list[PrintedLayer]:
    """Every decoder layer of a single-device program, printed.

    Raises RewriterError when a layer needs a value from outside the layers other than the embedding, or when more than
    one value leaves the last.
    """
    flow = Flow(program)
    labels = _stream_labels(program)
    count = program.source.num_layers
    crossing = [flow.crossing(boundary) for boundary in range(count + 1)]
    return [_print_layer(program, index, flow, crossing[index], crossing[index + 1], labels) for index in range(count)]


class Flow:
    """Who computes what, and how long it is needed."""

    def __init__(self, program: Program) -> None:
        self.nodes = list(program.graph.nodes)
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.last_use: dict[fx.Node, int] = {}
        count = program.source.num_layers
        inside = [n for n in self.nodes if marks(n).layer is not None]
        leaving = [n for n in inside if any(marks(u).layer is None for u in n.users)]
        if len(leaving) != 1:
            names = ", ".join(n.name for n in leaving) or "none"
            raise RewriterError(
                f"one value has to leave the decoder layers of {program.source.model_type}; here: {names}"
            )
        self.last_use[leaving[0]] = count
        for node in reversed(self.nodes):
            layer = marks(node).layer
            if layer is None or node not in self.last_use:
                continue
            for operand in operands(node):
                home = marks(operand).layer
                if home is not None and home > layer:
                    raise RewriterError(f"{node.name} of layer {layer} reads {operand.name} of the later layer {home}")
                self.last_use[operand] = max(self.last_use.get(operand, -1), layer)
        entries = [n for n in self.last_use if marks(n).layer is None]
        if len(entries) != 1:
            names = ", ".join(n.name for n in entries) or "none"
            raise RewriterError(f"the decoder layers can read one value from outside, the hidden state; here: {names}")

    def crossing(self, boundary: int) -> list[fx.Node]:
        """The values that enter layer `boundary`, newest first."""
        alive = [n for n, last in self.last_use.items() if self._home(n) < boundary <= last]
        return sorted(alive, key=self.order.__getitem__, reverse=True)

    def inside(self, layer: int) -> list[fx.Node]:
        return [n for n in self.nodes if n in self.last_use and marks(n).layer == layer]

    @staticmethod
    def _home(node: fx.Node) -> int:
        layer = marks(node).layer
        return -1 if layer is None else layer


def _stream_labels(program: Program) -> dict[str, str]:
    """What the stream is called after each block (by the name of the add): `after_mlp`."""
    labels = {}
    for block in residual_blocks(program.origin or program):
        part = "layer" if block.kind == "parallel" else block.path.rpartition(".")[2]
        labels[block.add.name] = f"after_{part}"
    return labels


def _print_layer(
    program: Program,
    index: int,
    flow: Flow,
    takes: list[fx.Node],
    gives: list[fx.Node],
    labels: Mapping[str, str],
) -> PrintedLayer:
    path = program.layer_path(index)
    argument_names = program.source.of_layer(index).layer_arguments
    unique = Names("self", "kwargs", "torch", *argument_names)
    names = {takes[0]: argument_names[0]}
    for node in takes[1:]:
        names[node] = unique.fresh("earlier_states")
    statements = []
    for node in flow.inside(index):
        names[node] = unique.fresh(_wish(node, path, labels))
        head, items, tail = call_parts(node, path, names)
        statements.append((names[node], _statement(names[node], head, items, tail)))
    newest = marks(gives[0]).stream
    ages = tuple(None if newest is None or not in_stream(g) else newest - stream_index(g) for g in gives)
    return PrintedLayer(tuple(names[n] for n in takes), tuple(names[n] for n in gives), tuple(statements), ages)


def _statement(variable: str, head: str, items: list[str], tail: str) -> str:
    if not tail:
        return f"{' ' * _INDENT}{variable} = {head}"
    return bracketed(f"{variable} = {head}", items, tail, _INDENT)


def _wish(node: fx.Node, path: str, labels: Mapping[str, str]) -> str:
    if node.op == "call_module":
        return str(node.target).removeprefix(path + ".")
    if node.name in labels:
        return labels[node.name]
    if node.target is ops.blend:
        return "blended"
    return "total" if node.name.startswith("add") else node.name


__all__ = ["Flow", "PrintedLayer", "print_layers"]

"""A Program as text that a reader learns from, and as HTML for notebooks. Equal programs print alike in every process.

Values are named after the module or collective that makes them: `self_attn[3]` is the output of layer 3's attention,
`self_attn.sum[3]` its all-reduce. In a fold of layers that print alike, i is the layer: `mlp.sum[i-1]`.
"""

from __future__ import annotations

import hashlib
import html
from collections import Counter
from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
from torch import fx

from rewriter.ir import ops
from rewriter.ir.marks import in_stream, marks, running_layer
from rewriter.ir.shapes import Value, is_shape, wiring_shapes
from rewriter.ir.structure import Body, Module, Parameter, ProgramData, placeholders, walk_modules

Namer = Callable[[int], str]
_SUFFIX = {
    ops.all_reduce: "sum", ops.all_reduce_start: "pending", ops.all_gather: "all", ops.copy_to_group: "in",
    ops.agreed: "agreed",
    ops.shard_tokens: "own", ops.gather_tokens: "whole",
}  # fmt: skip


def program_text(program: ProgramData, fold: bool = True) -> str:
    """The IR as text: wiring, distinct modules, parameters, history. Alike layers are folded unless `fold` is False."""
    return "\n\n".join(f"{title}\n{text}" if text else title for title, text in _sections(program, fold)) + "\n"


_drawings: list[Callable[[Any], str]] = []


def draw_with(drawing: Callable[[Any], str]) -> None:
    """Let a program's HTML begin with what `drawing(program)` returns: for a room above, which knows what to draw."""
    if drawing not in _drawings:
        _drawings.append(drawing)


def program_html(program: ProgramData) -> str:
    """The same sections for a notebook, each but the first folded away, below the drawings that `draw_with` was given;
    every character of the model is escaped."""
    (head, _), *sections = _sections(program, True)
    parts = [f"<div><code>{html.escape(head)}</code></div>", *(drawing(program) for drawing in _drawings)]
    for index, (title, text) in enumerate(sections):
        opened = " open" if index == 0 else ""
        parts.append(
            f"<details{opened}><summary>{html.escape(title)}</summary><pre>{html.escape(text)}</pre></details>"
        )
    return "\n".join(parts)


def _sections(program: ProgramData, fold: bool) -> list[tuple[str, str]]:
    source = program.source
    mesh = ", ".join(f"{axis}={size}" for axis, size in program.mesh.items()) or "one device"
    kinds = _Kinds(program)
    return [
        (f"{source.architecture} ({source.model_type}), {source.num_layers} layers, {mesh}", ""),
        ("wiring", _Wiring(program, kinds).text(fold)),
        *kinds.sections(fold),
        ("parameters", _parameters(program, fold)),
        *([("history", _history(program))] if program.history else []),
    ]


class _Kinds:
    """A name for every distinct module that is no plain leaf: its class, numbered where one class has several."""

    def __init__(self, program: ProgramData) -> None:
        self.names: dict[int, str] = {}
        paths: dict[int, list[str]] = {}
        distinct: dict[int, Body] = {}
        for path, module in walk_modules(program.modules):
            if isinstance(module, Body):
                distinct.setdefault(id(module), module)
                paths.setdefault(id(module), []).append(path)
        # bodies that print alike are one, whether or not they are the same object
        known: dict[str, tuple[str, Body, list[str]]] = {}
        used: Counter[str] = Counter()
        for body in sorted(distinct.values(), key=_depth):  # inner ones first
            text = f"{body.class_name}\n{body_text(body, self.of, full=True)}"
            if text not in known:
                used[body.class_name] += 1
                number = used[body.class_name]
                known[text] = (body.class_name if number == 1 else f"{body.class_name}.{number}", body, [])
            name, _, users = known[text]
            users += paths[id(body)]
            self.names[id(body)] = name
        self.bodies = list(known.values())

    def of(self, module: Module) -> str:
        return self.names[id(module)] if isinstance(module, Body) else str(module)

    def sections(self, fold: bool) -> list[tuple[str, str]]:
        return [
            (
                f"{name}: {paths[0]}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''}",
                body_text(body, self.of, not fold),
            )
            for name, body, paths in self.bodies
        ]


def _depth(body: Body) -> int:
    return 1 + max((_depth(m) for m in body.modules.values() if isinstance(m, Body)), default=0)


def body_text(body: Body, kind: Callable[[Module], str], full: bool = False) -> str:
    """One body: what it holds, then its graph. With `full`, constants are told apart by a hash of their bytes."""
    lines = [f"  {name} = {kind(module)}" for name, module in body.modules.items()]
    lines += [
        f"  {name}: {'buffer' if name in body.stored else 'parameter'}{_sizes(shape)}"
        for name, shape in body.parameters.items()
    ]
    lines += [f"  {name}: {constant(value, full)}" for name, value in body.buffers.items()]
    lines.append(f"  ({', '.join(n.name for n in placeholders(body.graph))}) {{")
    for node in body.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            continue
        lines.append("    " + statement(node, lambda n: str(n.target) if n.op == "get_attr" else n.name))
    return "\n".join([*lines, "  }"])


def constant(value: torch.Tensor, full: bool) -> str:
    """`float32[8] = 1, 0.178, …`; with `full`, also a hash of the bytes."""
    flat = value.detach().cpu().reshape(-1)
    first = ", ".join(f"{float(x):.3g}" for x in flat[:3]) + (", …" if flat.numel() > 3 else "")
    text = f"{str(value.dtype).removeprefix('torch.')}{_sizes(tuple(value.shape))} = {first}"
    if full:
        text += f"  sha256 {hashlib.sha256(flat.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]}"
    return text


def statement(node: fx.Node, name: Callable[[fx.Node], str]) -> str:
    """`value = callee(arguments)`, with nodes as `name` calls them."""
    if node.op == "output":
        return f"return {argument(node.args[0], name)}"
    return f"{name(node)} = {_callee(node)}({_arguments(node, name)})"


def _callee(node: fx.Node) -> str:
    if node.op == "call_function":
        if isinstance(node.target, torch._ops.OpOverload):
            return str(node.target).removesuffix(".default")
        return getattr(node.target, "__name__", str(node.target))
    return str(node.target)


def _arguments(node: fx.Node, name: Callable[[fx.Node], str]) -> str:
    parts = [argument(a, name) for a in node.args]
    return ", ".join([*parts, *(f"{key}={argument(value, name)}" for key, value in node.kwargs.items())])


def argument(value: Any, name: Callable[[fx.Node], str]) -> str:
    """An argument of a node, with nodes as `name` calls them."""
    if isinstance(value, fx.Node):
        return name(value)
    if isinstance(value, (list, tuple)):
        inner = ", ".join(argument(v, name) for v in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
    if isinstance(value, ops.MaskSpec):
        return value.label
    if isinstance(value, ops.SequencePlan):
        return str(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return repr(value)


# --- the wiring ------------------------------------------------------------------------------------------------------


class _Wiring:
    """Lines of the wiring, by the layer that runs them."""

    def __init__(self, program: ProgramData, kinds: _Kinds) -> None:
        self.program, self.kinds = program, kinds
        self.shapes = wiring_shapes(program)
        self.names = _value_names(program)

    def text(self, fold: bool) -> str:
        graph = self.program.graph
        inputs = [(node.name, self.shapes[node]) for node in placeholders(graph)]
        named = ", ".join(f"{name}{_sizes(shape)}" if is_shape(shape) else name for name, shape in inputs)
        computed = (node for node in graph.nodes if node.op != "placeholder")
        runs = [(layer, list(nodes)) for layer, nodes in groupby(computed, running_layer)]
        lines = [f"  ({named}) {{"]
        index = 0
        while index < len(runs):
            layer, nodes = runs[index]
            if layer is None:
                lines += ["    " + self._line(n, str) for n in nodes]
                index += 1
                continue
            relative = self._relative(layer, nodes)
            count = 1
            for other, others in runs[index + 1 :] if fold else ():
                if other != layer + count or self._relative(other, others) != relative:
                    break
                count += 1
            if count > 1:
                lines.append(f"    layers i = {layer}–{layer + count - 1} ×{count} {{")
                lines += ["      " + line for line in relative]
            else:
                lines.append(f"    layer {layer} {{")
                lines += ["      " + self._line(n, str) for n in nodes]
            lines.append("    }")
            index += count
        return "\n".join([*lines, "  }"])

    def _relative(self, layer: int, nodes: list[fx.Node]) -> list[str]:
        def namer(other: int) -> str:
            return f"i{other - layer:+d}" if other != layer else "i"

        return [self._line(n, namer) for n in nodes]

    def _line(self, node: fx.Node, index: Namer) -> str:
        def name(n: fx.Node) -> str:
            layer = marks(n).layer
            return self.names[n] + (f"[{index(layer)}]" if layer is not None else "")

        if node.op == "output":
            return f"return {argument(node.args[0], name)}"
        shape = self.shapes[node]
        shown = f": {_value(shape)}" if shape is not None else ""
        if node.op == "call_module":
            path = str(node.target)
            prefix, layer = self.program.source.layers + ".", marks(node).layer
            if layer is not None and path.startswith(prefix):
                path = f"{prefix}{index(layer)}.{path.removeprefix(prefix).partition('.')[2]}"
            module = self.program.modules[str(node.target)]
            what = f"{path}({_arguments(node, name)})  # {self.kinds.of(module)}"
        else:
            what = f"{_callee(node)}({_arguments(node, name)})"
        mark = "  # beside the next block" if marks(node).beside else ""
        mark = "  # the residual stream" if in_stream(node) else mark
        return f"{name(node)}{shown} = {what}{mark if '#' not in what else ''}"


def _value_names(program: ProgramData) -> dict[fx.Node, str]:
    """A name per value, unique within its layer."""
    names: dict[fx.Node, str] = {}
    taken: set[tuple[int | None, str]] = set()
    for node in program.graph.nodes:
        layer = marks(node).layer
        if node.op == "placeholder":
            name = node.name
        elif node.op == "call_module":
            name = str(node.target).removeprefix(f"{program.source.layers}.{layer}.")
            name = name.rpartition(".")[2] if layer is None else name
        elif node.target is ops.all_reduce_wait:
            name = names[node.args[0]].removesuffix(".pending") + ".sum"
        elif node.target in _SUFFIX:
            name = f"{names[node.args[0]]}.{_SUFFIX[node.target]}"
        elif in_stream(node):
            name = "x"
        elif _callee(node) == "getitem" and isinstance(node.args[1], int):
            name = f"{names[node.args[0]]}.{node.args[1]}"
        else:
            name = _callee(node).removeprefix("aten.").partition(".")[0]
        base, number = name, 1
        while (layer, name) in taken:
            number += 1
            name = f"{base}{number}" if base == "x" else f"{base}_{number}"
        taken.add((layer, name))
        names[node] = name
    return names


def _value(value: Value) -> str:
    if value is None:
        return "?"
    return _sizes(value) if is_shape(value) else f"({', '.join(_value(v) for v in value)})"  # type: ignore[arg-type]


def _sizes(shape: Any) -> str:
    return f"[{', '.join(map(str, shape))}]"


# --- parameters and history ------------------------------------------------------------------------------------------


def _parameters(program: ProgramData, fold: bool) -> str:
    """A line per parameter, alike ones of the layers folded; ranges say what each rank holds of a split dimension."""
    prefix = program.source.layers + "."
    groups: dict[tuple[str, str], list[int]] = {}
    for name, parameter in program.parameters.items():
        layer, _, rest = name.removeprefix(prefix).partition(".")
        shown = f"{prefix}*.{rest}" if fold and name.startswith(prefix) and layer.isdigit() else name
        groups.setdefault((shown, _described(parameter)), []).append(int(layer) if layer.isdigit() else 0)
    lines = [f"  {name}{f' ×{len(names)}' if '*' in name else ''}: {text}" for (name, text), names in groups.items()]
    lines += [f"  {alias}: tied to {name}" for alias, name in program.ties.items()]
    return "\n".join(lines)


def _described(parameter: Parameter) -> str:
    text = _sizes(parameter.shape)
    if parameter.ranges is None or parameter.full_shape is None:
        return text
    ranks = " | ".join(" ".join(f"{a}:{b}" for a, b in ranges) for ranges in parameter.ranges)
    held = ", some on several ranks" if parameter.shared else ""
    return f"{text} of {_sizes(parameter.full_shape)}, dim {parameter.dim}: {ranks}{held}"


def _history(program: ProgramData) -> str:
    lines = []
    for entry in program.history:
        lines.append(f"  {entry.name}({entry.arguments()}), {entry.kind}: {entry.summary}")
        lines += [f"    {note}" for note in entry.notes]
    return "\n".join(lines)

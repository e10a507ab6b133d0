"""Printing of Python: constants, calls in the layout of `ruff format`, and the nodes of a wiring."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from rewriter import ops
from rewriter.common.errors import RewriterError
from rewriter.ir import SPLAT, Input, LayerArgument
from rewriter.ir.marks import marks

LINE_LENGTH = 120

_INFIX = {
    operator.add: "+",
    operator.iadd: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.matmul: "@",
}


def bracketed(head: str, items: Sequence[str], tail: str, indent: int) -> str:
    """`head` + items + `tail` (such as `f(`, …, `)`) from column `indent`, wrapped as `ruff format` wraps it."""
    pad = " " * indent
    flat = f"{pad}{head}{', '.join(items)}{tail}"
    if len(flat) <= LINE_LENGTH and "\n" not in flat:
        return flat
    inner = " " * (indent + 4) + ", ".join(items)
    if len(inner) <= LINE_LENGTH and "\n" not in inner:
        return f"{pad}{head}\n{inner}\n{pad}{tail}"
    lines = "".join(f"{pad}    {item},\n" for item in items)
    return f"{pad}{head}\n{lines}{pad}{tail}"


def constant(value: Any) -> str:
    """A constant of the wiring as Python. Raises RewriterError for what has no literal."""
    if isinstance(value, (bool, int, str, type(None), torch.dtype, type(Ellipsis))):
        if isinstance(value, str):
            return quoted(value)
        return "..." if value is ... else repr(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f'float("{value}")'
    raise RewriterError(f"a {type(value).__name__} in a layer's wiring cannot be written as Python: {value!r}")


def quoted(text: str) -> str:
    """A string literal in the quotes that `ruff format` prefers."""
    body = repr(text)
    if body.startswith("'") and '"' not in body:
        return f'"{body[1:-1]}"'
    return body


def tree(value: Any, leaf: Callable[[Any], str | None]) -> str:
    """Tuples, lists, dicts and slices around what `leaf` prints; where it gives None, constants."""
    printed = leaf(value)
    if printed is not None:
        return printed
    if isinstance(value, tuple):
        inner = ", ".join(tree(item, leaf) for item in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, list):
        return f"[{', '.join(tree(item, leaf) for item in value)}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{constant(k)}: {tree(item, leaf)}" for k, item in value.items()) + "}"
    if isinstance(value, slice):
        parts = ["" if part is None else tree(part, leaf) for part in (value.start, value.stop)]
        return ":".join(parts if value.step is None else [*parts, tree(value.step, leaf)])
    return constant(value)


def operands(node: fx.Node) -> list[fx.Node]:
    """The wiring nodes whose values the printed node names: a child's other tensors arrive as layer arguments."""
    call = marks(node).python
    if call is None:
        return list(node.all_input_nodes)
    found: list[fx.Node] = []

    def note(value: Any) -> str | None:
        if isinstance(value, Input):
            found.append(_argument(node, value))
            return ""
        return "" if isinstance(value, LayerArgument) else None

    tree(call.args, note)
    tree(call.kwargs, note)
    return found


def _argument(node: fx.Node, place: Input) -> fx.Node:
    argument = node.args[place.index]
    assert isinstance(argument, fx.Node)
    return argument


def call_parts(node: fx.Node, layer_path: str, names: Mapping[fx.Node, str]) -> tuple[str, list[str], str]:
    """(head, items, tail) of a node as an expression, for `bracketed`; `names` are the variables of other nodes."""
    if node.op == "call_module":
        return _child_call(node, layer_path, names)

    def leaf(value: Any) -> str | None:
        return names[value] if isinstance(value, fx.Node) else None

    if node.op == "get_attr":
        return f"self.{str(node.target).removeprefix(layer_path + '.')}", [], ""
    items = [tree(a, leaf) for a in node.args]
    keywords = [f"{k}={tree(v, leaf)}" for k, v in node.kwargs.items()]
    if node.op == "call_method":
        return f"{items[0]}.{node.target}(", [*items[1:], *keywords], ")"
    if node.target is ops.dropout:
        return "torch.nn.functional.dropout(", [items[0], f"p={items[1]}", "training=self.training"], ")"
    if node.target is ops.blend:
        return "blend(", [items[0], items[1], "self.annealing"], ")"
    if node.target is getattr:
        return f"{items[0]}.{node.args[1]}", [], ""
    if node.target is ops.type_as_model:
        return f"{items[0]}.to({items[1]}.dtype)", [], ""
    if node.target in _INFIX and not keywords:
        return f"{items[0]} {_INFIX[node.target]} {items[1]}", [], ""
    if node.target is operator.getitem:
        index = node.args[1]
        inner = ", ".join(tree(i, leaf) for i in index) if isinstance(index, tuple) and index else items[1]
        return f"{items[0]}[{inner}]", [], ""
    return f"{_function(node)}(", [*items, *keywords], ")"


def _child_call(node: fx.Node, layer_path: str, names: Mapping[fx.Node, str]) -> tuple[str, list[str], str]:
    call = marks(node).python
    assert call is not None

    def leaf(value: Any) -> str | None:
        if isinstance(value, Input):
            return names[_argument(node, value)]
        if isinstance(value, LayerArgument):
            return "kwargs" + value.name.removeprefix(SPLAT) if value.name.startswith(SPLAT) else value.name
        return None

    items = [tree(a, leaf) for a in call.args] + [f"{k}={tree(v, leaf)}" for k, v in call.kwargs.items()]
    if call.splat:
        items.append("**kwargs")
    index = "" if call.index is None else f"[{call.index}]"
    return f"self.{str(node.target).removeprefix(layer_path + '.')}(", items, f"){index}"


def _function(node: fx.Node) -> str:
    for home, prefix in ((torch.nn.functional, "torch.nn.functional"), (torch, "torch")):
        name = getattr(node.target, "__name__", "")
        if getattr(home, name, None) is node.target:
            return f"{prefix}.{name}"
    raise RewriterError(f"{node.name}: {node.target} in a layer's wiring cannot be written as Python")

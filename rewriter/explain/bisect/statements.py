"""Nodes in words: what they are called in a report, and what a pass made of them."""

from __future__ import annotations

from torch import fx

from rewriter.ir import Program
from rewriter.ir.marks import marks
from rewriter.ir.printing import statement


def operator_of(node: fx.Node) -> str:
    """The operation of a node: `aten.mul.Tensor`, `all_reduce`, `add`, or the path of the module that it calls."""
    if node.op == "call_function":
        return str(node.target) if "." in str(node.target)[:5] else getattr(node.target, "__name__", str(node.target))
    return str(node.target)


def text_of(node: fx.Node | None) -> str:
    """`name = operation(arguments)`, with names of the graph; empty for no node."""
    return "" if node is None else statement(node, lambda n: str(n.target) if n.op == "get_attr" else n.name)


def layer_of_path(program: Program, path: str) -> int | None:
    """The decoder layer that a module belongs to."""
    prefix = program.source.layers + "."
    first = path.removeprefix(prefix).partition(".")[0]
    return int(first) if path.startswith(prefix) and first.isdigit() else None


def layer_of_node(program: Program, node: fx.Node) -> int | None:
    """The decoder layer of a wiring node: its own, else that of the values that it is made from."""
    seen, todo = set(), [node]
    while todo:
        current = todo.pop(0)
        if (layer := marks(current).layer) is not None:
            return layer
        if current.op == "call_module" and (found := layer_of_path(program, str(current.target))) is not None:
            return found
        if current.op == "call_module":
            return None
        if current not in seen:
            seen.add(current)
            todo += current.all_input_nodes
    return None

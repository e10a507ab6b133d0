"""Layers that lay their tokens out in one dimension and back again (OPT) do not need to: the stream stays whole.

Between `x.reshape(-1, x.size(-1))` and `.view(x.shape)` stand only modules and sums that treat each token alike, so
both are left out of the wiring, and the residual sum between them becomes a sum of the stream itself.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

from torch import fx

from rewriter import ops
from rewriter.analysis.op_semantics import kind_of
from rewriter.ir import Body, Leaf, Module, drop_dead_nodes

_RESHAPES = ("reshape", "view")


def keep_tokens(graph: fx.Graph, modules: Mapping[str, Module]) -> None:
    """Take such pairs out of a wiring, in place; where anything else reads the flat tokens, they stay."""
    for node in list(graph.nodes):
        if _flattens(node):
            source = node.all_input_nodes[0]
            if (restored := _until_restored(node, source, modules)) is not None:
                for back in restored:
                    back.replace_all_uses_with(back.all_input_nodes[0])
                node.replace_all_uses_with(source)
    drop_dead_nodes(graph)


def _flattens(node: fx.Node) -> bool:
    """Whether a node is `x.reshape(-1, x.size(-1))`."""
    if node.op != "call_method" or node.target not in _RESHAPES or len(node.args) != 3 or node.args[1] != -1:
        return False
    size, width = node.args[2], ("call_method", "size", (node.args[0], -1))
    return isinstance(size, fx.Node) and (size.op, size.target, size.args) == width


def _until_restored(flat: fx.Node, source: fx.Node, modules: Mapping[str, Module]) -> list[fx.Node] | None:
    """The nodes that give all that comes from `flat` the shape of `source` again; None where a value stays flat."""
    restored: list[fx.Node] = []
    seen: set[fx.Node] = set()
    todo = list(flat.users)
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if _restores(node, source):
            restored.append(node)
        elif _treats_tokens_alike(node, modules):
            todo += node.users
        else:
            return None
    inside = {flat, *seen}
    whole = all(n in inside for node in seen - set(restored) for n in node.all_input_nodes)
    return restored if restored and whole else None


def _restores(node: fx.Node, source: fx.Node) -> bool:
    """Whether a node is `y.view(source.shape)`."""
    if node.op != "call_method" or node.target not in _RESHAPES or len(node.args) != 2:
        return False
    shape = node.args[1]
    return isinstance(shape, fx.Node) and shape.target is getattr and shape.args == (source, "shape")


def _treats_tokens_alike(node: fx.Node, modules: Mapping[str, Module]) -> bool:
    if node.op == "call_function":
        return node.target in (operator.add, operator.mul, ops.dropout)
    module = modules.get(str(node.target)) if node.op == "call_module" else None
    if isinstance(module, Leaf):
        return module.kind in ("Linear", "Conv1D", "LayerNorm", "Dropout")
    return isinstance(module, Body) and all(
        kind_of(n) == "pointwise" for n in module.graph.nodes if n.op in ("call_function", "call_module")
    )

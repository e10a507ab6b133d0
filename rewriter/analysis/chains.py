"""MLPs that a layer spells out: projections among its direct children, with activations between them (OPT, BART)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from rewriter.analysis.labels import is_tensor
from rewriter.analysis.op_semantics import function_of, is_pointwise, kind_of
from rewriter.analysis.projections import is_projection
from rewriter.ir import Body, Module, called_module, reachable
from rewriter.ir.marks import marks


@dataclass(frozen=True)
class Chain:
    """`exit(pointwise(entries(x)))`: wiring nodes; every entry's output channel becomes one input channel of `exit`."""

    entries: tuple[fx.Node, ...]
    exit: fx.Node


def chains(graph: fx.Graph, modules: Mapping[str, Module]) -> list[Chain]:
    """The chains of a wiring, in order. Nothing inside one is used elsewhere."""
    found = []
    for node in graph.nodes:
        if marks(node).layer is not None and is_projection(called_module(node, modules)):
            inside, entries = _inputs(node, modules)
            closed = all(set(n.users) <= {*inside, node} for n in (*inside, *entries))
            if entries and closed and not any(_inputs(e, modules)[1] for e in entries):
                found.append(Chain(tuple(entries), node))
    return found


def _inputs(exit: fx.Node, modules: Mapping[str, Module]) -> tuple[list[fx.Node], list[fx.Node]]:
    """(pointwise nodes, projections) that make the input of `exit`; no projections where something else does, too."""
    found = reachable(exit.all_input_nodes, lambda n: n.all_input_nodes if _keeps_channels(n, modules) else ())
    inside = [n for n in found if _keeps_channels(n, modules)]
    entries = [n for n in found if is_projection(called_module(n, modules))]
    return (inside, entries) if len(inside) + len(entries) == len(found) else ([], [])


def _keeps_channels(node: fx.Node, modules: Mapping[str, Module]) -> bool:
    if node.op == "call_function":
        return function_of(node) == "mul" or kind_of(node) == "activation"
    module = called_module(node, modules)
    return (
        isinstance(module, Body)
        and not (module.parameters or module.buffers or module.modules)
        and all(is_pointwise(n) for n in module.graph.nodes if n.op == "call_function" and is_tensor(n))
    )

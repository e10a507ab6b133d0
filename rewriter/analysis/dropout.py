"""Modules and calls of dropout, which a sharded wiring has none of."""

from __future__ import annotations

from torch import fx

from rewriter import ops
from rewriter.ir import Leaf, Module, Program, args_of, bypass, called_module


def is_dropout(module: Module | None) -> bool:
    return isinstance(module, Leaf) and module.kind == "Dropout"


def without_dropout(program: Program) -> fx.Graph:
    """A copy of the wiring without dropout: a runtime module computes in eval mode, and a partial sum must meet its
    sum."""
    graph, _ = program.edit()
    for node in list(graph.nodes):
        if node.target is ops.dropout or is_dropout(called_module(node, program.modules)):
            bypass(node, args_of(node)[0])
    return graph

"""Two all-reduces whose results are added become one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from rewriter import ops
from rewriter.analysis.residual import is_add
from rewriter.errors import RewriterError
from rewriter.passes.base import Kind, Scope, record
from rewriter.program import Program, args_of, drop_dead_nodes


@dataclass(frozen=True)
class MergeReductions:
    """AR(a) + AR(b) → AR(a + b), for parallel blocks: exact up to the order of the sum.

    Only where both sums are used nowhere else. A model without such a pair is left as it is.
    """

    name: ClassVar[str] = "merge_reductions"
    kind: ClassVar[Kind] = "exact"
    scope: ClassVar[Scope] = "runtime"

    def apply(self, program: Program) -> Program:
        graph, _ = program.edit()
        merged = 0
        for node in list(graph.nodes):
            if is_add(node) and (pair := _reductions(node)):
                first, second = pair
                axis = args_of(first)[1]
                with graph.inserting_before(node):
                    partial = graph.call_function(node.target, (args_of(first)[0], args_of(second)[0]))
                    total = graph.call_function(ops.all_reduce, (partial, axis))
                for new in (partial, total):
                    new.meta.update(node.meta)
                    new.meta.pop("stream", None)
                if "stream" in node.meta:
                    raise RewriterError(f"merge_reductions: {node.name} adds two reductions to nothing")
                node.replace_all_uses_with(total)
                merged += 1
        drop_dead_nodes(graph)
        summary = (
            f"{merged} pairs of all-reduces merged" if merged else "no pair of all-reduces is added: nothing to merge"
        )
        return record(program, self, summary, fired=merged > 0, graph=graph)


def _reductions(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    operands = node.all_input_nodes
    if len(operands) == 2 and all(o.target is ops.all_reduce and len(o.users) == 1 for o in operands):
        first, second = operands
        return (first, second) if args_of(first)[1] == args_of(second)[1] else None
    return None

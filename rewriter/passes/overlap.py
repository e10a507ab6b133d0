"""All-reduces that can overlap with computation are started early and waited for late."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import fx

from rewriter import ops
from rewriter.analysis.communication import hidden_starts
from rewriter.analysis.residual import computes
from rewriter.analysis.schedule import rescheduled
from rewriter.ir import Program, copy_graph, put_after
from rewriter.ir.marks import in_stream, mark, marks
from rewriter.passes.base import Effect, Pass, Scope, record
from rewriter.passes.branches import put_in_branches
from rewriter.passes.residual_rewrite import is_reduced


@dataclass(frozen=True)
class Overlap(Pass):
    """AR(f) → wait(start(f)) and a schedule (Ladder Residual, Alg. 1).

    A partial is computed when its turn comes in the model's order, and started at once; the wait, and what depends on
    it, comes where the next block needs the sum. Whoever else reads a partial runs before the start, which works in
    place. A reduction with no block between start and wait stays an all-reduce; the add after it runs with the next
    block. The mark `runs_in` is the layer that runs a node, None after the last one; `layer` still says whose it
    is. Exact. On one rank, or without an all-reduce in the wiring, the program is returned as it is.

    `branches` 2: a block whose sum nobody needs before the end of the layer's next block runs in a branch beside that
    block, as attention beside the MLP of a ladder layer. On CUDA the branch has a stream of a higher priority, so that
    its small kernels run while the other block's weights are read. The same sums are added in the same order.
    """

    branches: Literal[1, 2] = 1

    name: ClassVar[str] = "overlap"
    effect: ClassVar[Effect] = "exact"
    scope: ClassVar[Scope] = "runtime"

    def apply(self, program: Program) -> Program:
        reductions = [n for n in program.graph.nodes if n.target is ops.all_reduce and marks(n).layer is not None]
        if not reductions:
            return record(program, self, "no all-reduce to hide", fired=False)
        tried = _started(program, {n.name for n in reductions})
        hidden = {str(marks(n).reduction) for n in hidden_starts(tried, program.modules)}
        graph = _started(program, hidden)
        summary = f"{len(hidden)} of {len(reductions)} all-reduces overlap with the computation of another block"
        if self.branches == 2:
            summary += f", {put_in_branches(graph, program.modules)} blocks beside the next one"
        return record(program, self, summary, fired=bool(hidden), graph=graph)


def _started(program: Program, names: Collection[str]) -> fx.Graph:
    """The wiring in the new order, with the all-reduces of these names in two steps."""
    graph, _ = copy_graph(program.graph)
    for node in list(graph.nodes):
        if node.target is ops.all_reduce and node.name in names:
            put_after(node, ops.all_reduce_wait).meta.update(node.meta)
            node.target = ops.all_reduce_start
            mark(node, stream=None, mode=None, reduction=node.name)
    started = _last_start(graph)

    def late(node: fx.Node) -> bool:
        """A sum on its way; and a residual add after a sum that is there, which runs with the norm that follows."""
        added = in_stream(node) and any(map(is_reduced, node.all_input_nodes))
        return node.target is ops.all_reduce_wait or added

    def forces(node: fx.Node) -> bool:
        works = node.op == "call_module" and computes(program.modules[str(node.target)])
        return works or node.target is ops.all_reduce_start

    return rescheduled(graph, late, forces, started.__getitem__)


def _last_start(graph: fx.Graph) -> dict[fx.Node, int]:
    """Per node, the number of the last all-reduce that it depends on; -1 for none."""
    last: dict[fx.Node, int] = {}
    count = 0
    for node in graph.nodes:
        own = -1
        if node.target is ops.all_reduce_start:
            own, count = count, count + 1
        last[node] = max([last[n] for n in node.all_input_nodes] + [own])
    return last

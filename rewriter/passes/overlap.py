"""Every all-reduce is started as early, and waited for as late, as the data allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from rewriter import ops
from rewriter.analysis.communication import hidden_starts
from rewriter.analysis.schedule import earlier_readers, rescheduled
from rewriter.passes.base import Kind, Scope, record
from rewriter.program import Program


@dataclass(frozen=True)
class Overlap:
    """AR(f) → wait(start(f)) and a schedule (Ladder Residual, Alg. 1).

    A partial is computed as soon as its turn comes in the model's order and started at once; waits, and the adds behind
    them, are placed where the next partial needs their value. Who reads a partial besides its reduction, which works in
    place, runs before the start. `meta["runs_in"]` is the layer that runs a node, None after the last one;
    `meta["layer"]` still says whose it is.
    Exact. On one rank, or without an all-reduce in the wiring, the program is returned as it is.
    """

    name: ClassVar[str] = "overlap"
    kind: ClassVar[Kind] = "exact"
    scope: ClassVar[Scope] = "runtime"

    def apply(self, program: Program) -> Program:
        graph, _ = program.edit()
        reductions = [n for n in graph.nodes if n.target is ops.all_reduce and n.meta.get("layer") is not None]
        if not reductions:
            return record(program, self, "no all-reduce to hide", fired=False)
        for node in reductions:
            with graph.inserting_after(node):
                wait = graph.call_function(ops.all_reduce_wait, (node,))
            wait.meta.update(node.meta)
            node.target = ops.all_reduce_start
            node.replace_all_uses_with(wait, delete_user_cb=lambda user, wait=wait: user is not wait)
            if "stream" in node.meta:
                del node.meta["stream"]
        graph = _scheduled(graph)
        hidden = len(hidden_starts(graph, program.modules))
        summary = f"{hidden} of {len(reductions)} all-reduces run behind the computation of another block"
        return record(program, self, summary, fired=hidden > 0, graph=graph)


def _scheduled(graph: fx.Graph) -> fx.Graph:
    """The graph in the new order."""
    starts = [n for n in graph.nodes if n.target is ops.all_reduce_start]
    latest = _latest_start(graph, starts)
    return rescheduled(graph, [*starts, graph.output_node()], earlier_readers(graph), latest.__getitem__)


def _latest_start(graph: fx.Graph, starts: list[fx.Node]) -> dict[fx.Node, int]:
    """Per node, the number of the last all-reduce that it depends on; -1 for none."""
    number = {start: i for i, start in enumerate(starts)}
    latest: dict[fx.Node, int] = {}
    for node in graph.nodes:
        latest[node] = max([latest[n] for n in node.all_input_nodes] + [number.get(node, -1)], default=-1)
    return latest

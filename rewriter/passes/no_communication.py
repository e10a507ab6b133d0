"""The upper bound: every collective removed. The result is meaningless, its timing is not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from rewriter.common.errors import RewriterError
from rewriter.ir import Program, args_of, bypass, edit_bodies, ops
from rewriter.ir.marks import in_stream, mark, marks
from rewriter.passes.base import Effect, Pass, Scope, record

_FREE = (ops.copy_to_group, ops.agreed)


@dataclass(frozen=True)
class NoCommunication(Pass):
    """AR(f) → f: what a model would take if communication were free (Ladder Residual, section 3.3, "upper bound").

    Also the reductions inside bodies and the vocabulary's go; the gathered logits are taken from one rank. What ranks
    that share the tokens of a sequence send stays. Timing only: emitting a checkpoint from it is refused.
    """

    name: ClassVar[str] = "no_communication"
    effect: ClassVar[Effect] = "timing only"
    scope: ClassVar[Scope] = "runtime"

    def apply(self, program: Program) -> Program:
        if program.mesh.get("tp", 1) == 1:
            raise RewriterError("no_communication: the program runs on one device and does not communicate. Give --tp.")
        graph, _ = program.edit()
        removed = _silence(graph)
        modules = edit_bodies(program.modules, _silence)
        return record(program, self, f"{removed} collectives removed", graph=graph, modules=modules)


def _silence(graph: fx.Graph) -> int:
    """Remove every collective of a graph; returns how many."""
    removed = 0
    for node in list(graph.nodes):
        if node.target is ops.all_gather:
            node.target = ops.repeat_shard  # every rank needs logits of the full width: its own, repeated
            removed += 1
        elif node.target in (ops.all_reduce, ops.all_reduce_start, ops.all_reduce_wait, *_FREE):
            if in_stream(node):
                mark(args_of(node)[0], stream=marks(node).stream)
            bypass(node, args_of(node)[0])
            removed += node.target not in _FREE
    return removed

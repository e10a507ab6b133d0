"""The upper bound: every collective removed. The result is meaningless, its timing is not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rewriter import ops
from rewriter.common.errors import RewriterError
from rewriter.ir import Body, Module, Program, args_of, copy_graph, map_bodies
from rewriter.ir.marks import in_stream, mark, marks
from rewriter.passes.base import Effect, Pass, Scope, record


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

        def silence(path: str, module: Module) -> Module:
            if not isinstance(module, Body):
                return module
            inner, _ = copy_graph(module.graph)
            _silence(inner)
            modules = {name: silence(name, child) for name, child in module.modules.items()}
            return Body(**{**module.__dict__, "graph": inner, "modules": modules})

        modules = map_bodies(program.modules, silence)
        return record(program, self, f"{removed} collectives removed", graph=graph, modules=modules)


def _silence(graph: object) -> int:
    removed = 0
    for node in list(graph.nodes):  # type: ignore[attr-defined]
        if node.target is ops.all_gather:
            # every rank needs logits of the full width: its own, repeated
            node.target, node.args = ops.repeat_shard, node.args
            removed += 1
        elif node.target in (ops.all_reduce, ops.all_reduce_start, ops.all_reduce_wait, ops.copy_to_group):
            if in_stream(node):
                mark(args_of(node)[0], stream=marks(node).stream)
            node.replace_all_uses_with(args_of(node)[0])
            graph.erase_node(node)  # type: ignore[attr-defined]
            removed += node.target is not ops.copy_to_group
    return removed

"""Names of wiring values in an emitted module: they say what a value is, the same for equal layers.

x           the residual stream, equal on all ranks (x_before: as it was some blocks earlier)
x_own       this rank's own residual: the stream plus what this rank alone added to it
delta       what this rank added since all ranks last agreed
share       this rank's part of a value whose sum over the ranks is taken
update      what several modules of a block add to the stream
f_pending   the sum of f over ranks, on its way
"""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch import fx

from rewriter.emit.python_source import UniqueNames
from rewriter.emit.statements import last_name
from rewriter.ir import Body, Program, args_of, ops
from rewriter.ir.marks import in_stream, marks
from rewriter.ir.residual import is_add

_SUMS = (ops.all_reduce_wait, ops.all_reduce, ops.all_gather, ops.repeat_shard)


class Roles:
    """Names for the values of one program. `local` are the values that differ by rank."""

    def __init__(self, program: Program, local: Collection[fx.Node]) -> None:
        self.program, self.local = program, local

    def of(self, node: fx.Node) -> str:
        """The name of `node` in a layer."""
        if marks(node).role is not None:
            return str(marks(node).role)
        if in_stream(node) or marks(node).reads is not None:
            return "x_own" if node in self.local else "x"
        if node.op == "placeholder":
            return str(node.target)
        if marks(node).handed_on is not None:
            return self.in_context(node)
        if node.op == "call_module":
            return last_name(str(node.target).partition("#")[0])
        if node.target is ops.all_reduce_start:
            return f"{self.of(args_of(node)[0])}_pending"
        if node.target in (ops.shard_tokens, ops.gather_tokens):
            return self.of(args_of(node)[0])
        if node.target in _SUMS:
            return self.of(args_of(node)[0]).removesuffix("_pending")
        if node.target is ops.copy_to_group:
            entered = self.of(args_of(node)[0])
            return "x_own" if entered == "x" and marks(node).layer is not None else entered
        if node.target is torch.ops.aten.sym_size.int:
            return {0: "batch", 1: "length"}.get(args_of(node)[1], "size")
        if marks(node).layer is None:  # around the layers: a scale, a cap
            source = args_of(node)[0] if node.args else None
            return self.of(source) if isinstance(source, fx.Node) and not is_add(node) else "x"
        return self._computed(node)

    def _computed(self, node: fx.Node) -> str:
        """Sums and multiples inside of a layer."""
        if node.target is ops.where_rewired:
            return self.of(args_of(node)[1])
        if node.target is getattr:
            return str(args_of(node)[1])
        operands = [self.of(n) for n in node.all_input_nodes]
        if is_add(node):
            if "x_own" in operands:
                return "x_own"
            if marks(node).writes is not None:
                return "share" if "share" in operands and self._is_summed(node) else "delta"
            return "update"
        if marks(node).writes is not None and node.target is operator.mul:
            return "share"
        return operands[0] if len(operands) == 1 or node.op == "call_method" else "total"

    @staticmethod
    def _is_summed(node: fx.Node) -> bool:
        """True if all that reads `node` is a reduction that gives the stream itself."""
        return all(in_stream(user) or user.target is ops.all_reduce_start for user in node.users)

    def crossing(self, nodes: Collection[fx.Node], context: Collection[fx.Node]) -> dict[fx.Node, str]:
        """Names of values that cross from layer to layer, in the order in which they are passed."""
        unique = UniqueNames()
        result: dict[fx.Node, str] = {}
        for node in nodes:
            wanted = self.in_context(node) if node in context else self.of(node)
            result[node] = unique.new("x_before" if wanted == "x" and "x" in unique.taken else wanted)
        return result

    def in_context(self, node: fx.Node) -> str:
        """Values that every layer reads (rotary tables) are named as the layers' bodies call them."""
        for user in node.users:
            if user.op == "call_module" and marks(user).layer is not None:
                body = self.program.modules[str(user.target)]
                if isinstance(body, Body):
                    inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
                    return str(inputs[user.args.index(node)].target)
        return "handed_on" if marks(node).handed_on is not None else self.of(node)

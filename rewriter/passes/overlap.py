"""All-reduces that can overlap with computation are started early and waited for late."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import fx

from rewriter.ir import Module, Program, copy_graph, ops, put_after, reachable
from rewriter.ir.communication import computed_meanwhile
from rewriter.ir.marks import block_of, in_stream, mark, marks, running_layer, stream_index
from rewriter.ir.op_semantics import kind_of, starts_sum
from rewriter.ir.residual import computes, is_carry
from rewriter.ir.schedule import rescheduled
from rewriter.passes.base import Effect, Pass, Scope, record
from rewriter.passes.residual_rewrite import is_reduced


@dataclass(frozen=True)
class Overlap(Pass):
    """AR(f) → wait(start(f)) and a schedule (Ladder Residual, Alg. 1).

    A partial is computed when its turn comes in the model's order, and started at once; the wait, and what depends on
    it, comes where the next block needs the sum. Whoever else reads a partial runs before the start, which works in
    place. A reduction with no block between start and wait stays an all-reduce; the add after it runs with the next
    block. The mark `runs_in` is the layer that runs a node, None after the last one; `layer` still says whose it
    is. Exact. On one rank, or without an all-reduce in the wiring, the program is returned as it is.

    `branches` 2: a block whose sum nobody needs before the end of the layer's next block runs in a branch next to that
    block, as attention next to the MLP of a ladder layer. On CUDA the branch has a stream of a higher priority, so that
    its small kernels run while the other block's weights are read. The same sums are added in the same order.
    """

    branches: Literal[1, 2] = 1

    name: ClassVar[str] = "overlap"
    effect: ClassVar[Effect] = "exact"
    routine: ClassVar[bool] = True
    scope: ClassVar[Scope] = "runtime"
    schedules: ClassVar[bool] = True

    def apply(self, program: Program) -> Program:
        reductions = [n for n in program.graph.nodes if n.target is ops.all_reduce and marks(n).layer is not None]
        if not reductions:
            return record(program, self, "no all-reduce to hide", fired=False)
        tried = _started(program, {n.name for n in reductions})
        meanwhile = {start: blocks for start, blocks in computed_meanwhile(tried, program.modules).items() if blocks}
        hidden = {str(marks(start).reduction) for start in meanwhile}
        graph = _started(program, hidden)
        summary = f"{len(hidden)} of {len(reductions)} all-reduces overlap with computation"
        if own := sum(all(block == block_of(start) for block in blocks) for start, blocks in meanwhile.items()):
            summary += f", {own} of them only with what their block carries on"
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
        # what a block carries on and scales by waits with the sum that it is of: no sum is started by it
        return (works and not is_carry(node)) or node.target is ops.all_reduce_start

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


@dataclass
class _Stretch:
    """Nodes of a layer up to a reduction, and that reduction."""

    nodes: list[fx.Node]
    end: fx.Node


def put_in_branches(graph: fx.Graph, modules: Mapping[str, Module]) -> int:
    """Let blocks of a scheduled wiring run next to the next block of their layer; the number of such blocks.

    Such a block's reduction is waited for after the next block, which therefore does not need it. Its nodes up to the
    start get the mark `beside`. The two blocks share no value that one of them computes: a residual add that both need
    is there twice, with the same operands in the same order, so that no bit changes.
    """
    count = 0
    for layer, nodes in itertools.groupby(list(graph.nodes), key=running_layer):
        if layer is None:
            continue
        stretches, index = _stretches(list(nodes)), 0
        while index + 1 < len(stretches):
            block, following = stretches[index : index + 2]
            branch = _branch(block, following, modules)
            if branch:
                _separate(block, branch)
                count += 1
            index += 2 if branch else 1
    return count


def _stretches(nodes: Sequence[fx.Node]) -> list[_Stretch]:
    stretches: list[_Stretch] = []
    current: list[fx.Node] = []
    for node in nodes:
        if starts_sum(node):
            stretches.append(_Stretch(current, node))
            current = []
        else:
            current.append(node)
    return stretches


def _branch(block: _Stretch, following: _Stretch, modules: Mapping[str, Module]) -> list[fx.Node]:
    """The nodes of `block` that can run next to `following`, in order; none where it has to come before."""
    works = any(n.op == "call_module" and computes(modules[str(n.target)]) for n in following.nodes)
    if block.end.target is not ops.all_reduce_start or not works:
        return []
    if any(user in following.nodes for user in block.end.users):  # the wait
        return []
    own = [n for n in block.nodes if kind_of(n) != "collective"]
    needed = reachable([block.end], lambda n: (s for s in n.all_input_nodes if s in own))
    branch = [n for n in own if n in needed]
    leaves = any(user not in branch and user is not block.end for n in branch if not in_stream(n) for user in n.users)
    return [] if leaves else branch


def _separate(block: _Stretch, branch: Sequence[fx.Node]) -> None:
    """Let the branch have residual adds of its own, and move what the layer goes on with after the start."""
    graph, own = block.end.graph, dict[fx.Node, fx.Node]()
    for node in branch:
        if in_stream(node):
            with graph.inserting_before(node):
                own[node] = graph.node_copy(node, lambda n: own.get(n, n))
            mark(own[node], stream=None, mode=None, reads=stream_index(node), beside=True)
        else:
            for value, copy in own.items():
                node.replace_input_with(value, copy)
            mark(node, beside=True)
    mark(block.end, beside=True)
    first = own.get(branch[0], branch[0])
    for node in block.nodes:
        if kind_of(node) == "collective":
            first.prepend(node)  # a wait that the branch needs: before it begins
    for node in reversed(block.nodes):
        if kind_of(node) != "collective" and not marks(node).beside:
            _put_off(node, block.end)


def _put_off(node: fx.Node, end: fx.Node) -> None:
    """Move `node` to its first reader in the layer, after `end`."""
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    readers = [n for n in node.users if running_layer(n) == running_layer(node)]
    if readers:
        min(readers, key=order.__getitem__).prepend(node)
    else:
        end.append(node)

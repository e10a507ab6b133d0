"""The order in which a wiring runs, where reductions overwrite what they sum.

An all-reduce works in place on the partial. Whoever else reads the partial (an own-partial ladder adds a rank's own
part to the stream) must therefore run before the reduction begins.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

from torch import fx

from rewriter.common.errors import RewriterError
from rewriter.ir import reachable
from rewriter.ir.marks import mark, marks, running_layer
from rewriter.ir.op_semantics import starts_sum


def earlier_readers(graph: fx.Graph, copies: bool = False) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Per reduction that overwrites a value which others read too: those readers.

    Where a reader needs the sum as well no order is right: raises RewriterError. With `copies` a reduction works on a
    copy where a reader comes after it: such readers, and other reductions of the same value, are left out.
    """
    by_reduction: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node in graph.nodes:
        if not starts_sum(node):
            continue
        partial = node.all_input_nodes[0]
        readers = tuple(user for user in partial.users if user is not node and not (copies and starts_sum(user)))
        if not readers:
            continue
        later = reachable(node.users, lambda n: n.users)
        if copies and any(reader in later for reader in readers):
            continue
        for reader in readers:
            if reader in later:
                raise RewriterError(
                    f"{reader.name} reads the partial {partial.name} and its sum {node.name}, which takes its place in "
                    "memory: no order of the two is right"
                )
        by_reduction[node] = readers
    return by_reduction


def rescheduled(
    graph: fx.Graph,
    late: Callable[[fx.Node], bool],
    forces: Callable[[fx.Node], bool],
    priority: Callable[[fx.Node], int],
    copies: bool = False,
) -> fx.Graph:
    """A copy of `graph` in its own order, but for nodes that may come late.

    A node that is `late`, or needs one that has not run yet, is put off until a node that `forces` (or the output)
    needs it. What one node needs is then computed in order of rising `priority`. `marks(copy).runs_in` is the
    layer that it runs in: its own, or that of the node which forced it.
    """
    readers = earlier_readers(graph, copies)
    new = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}

    def missing(node: fx.Node) -> list[fx.Node]:
        return [n for n in (*node.all_input_nodes, *readers.get(node, ())) if n not in env]

    def pull(target: fx.Node) -> None:
        stack = [target]  # depth first without recursion
        while stack:
            top = stack[-1]
            if top in env:
                stack.pop()
            elif needed := missing(top):
                stack += sorted(needed, key=priority)[::-1]
            else:
                stack.pop()
                # the results of a call are taken apart where it stands
                elements = [n for n in top.users if n.target is operator.getitem] if top.op == "call_module" else []
                for node in (top, *elements):
                    env[node] = new.node_copy(node, env.__getitem__)
                    if marks(node).layer is not None:
                        mark(env[node], runs_in=running_layer(target))

    for node in graph.nodes:
        if node.op in ("placeholder", "output") or forces(node) or not (late(node) or missing(node)):
            pull(node)
    return new


def with_readers_first(graph: fx.Graph, copies: bool = False) -> fx.Graph:
    """`graph` itself where its order is right, else the same one with such readers moved before the reductions.

    `copies`: reductions work on a copy where a reader comes after them (see `earlier_readers`).
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    readers = earlier_readers(graph, copies)
    if all(order[reader] < order[node] for node, others in readers.items() for reader in others):
        return graph
    return rescheduled(graph, lambda _: False, lambda _: True, order.__getitem__, copies)

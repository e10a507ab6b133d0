"""The order in which a wiring runs, where reductions overwrite what they sum.

An all-reduce works in place on the partial. Whoever else reads the partial (an own-partial ladder adds a rank's own
part to the stream) must therefore run before the reduction begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import fx

from rewriter import ops
from rewriter.errors import RewriterError

IN_PLACE = frozenset({ops.all_reduce, ops.all_reduce_start})


def earlier_readers(graph: fx.Graph) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Per reduction that overwrites a value which others read too: those readers.

    Raises RewriterError where a reader needs the sum as well, so that no order is right.
    """
    found: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node in graph.nodes:
        if node.target not in IN_PLACE:
            continue
        partial = node.all_input_nodes[0]
        readers = tuple(user for user in partial.users if user is not node)
        if not readers:
            continue
        later = _downstream(node)
        for reader in readers:
            if reader in later:
                raise RewriterError(
                    f"{reader.name} reads the partial {partial.name} and its sum {node.name}, which takes its place in "
                    "memory: no order of the two is right"
                )
        found[node] = readers
    return found


def _downstream(node: fx.Node) -> set[fx.Node]:
    """Everything that depends on `node`."""
    reached: set[fx.Node] = set()
    todo = [node]
    while todo:
        for user in todo.pop().users:
            if user not in reached:
                reached.add(user)
                todo.append(user)
    return reached


def rescheduled(
    graph: fx.Graph,
    targets: Iterable[fx.Node],
    readers: Mapping[fx.Node, tuple[fx.Node, ...]],
    priority: Callable[[fx.Node], int],
) -> fx.Graph:
    """A copy of `graph` that computes `targets` in their order, each with what it needs and no sooner.

    What one node needs is computed in order of falling `priority`, after equal ones in the order of its operands.
    `meta["runs_in"]` of a copy is the layer of the target that it was needed for.
    """
    new = fx.Graph()
    env = {node: new.node_copy(node) for node in graph.nodes if node.op == "placeholder"}
    for target in targets:
        layer = target.meta.get("layer")
        stack = [target]  # depth first without recursion
        while stack:
            top = stack[-1]
            if top in env:
                stack.pop()
                continue
            needed = [*top.all_input_nodes, *readers.get(top, ())]
            missing = [n for n in needed if n not in env]
            if missing:
                stack += sorted(missing, key=priority)[::-1]
                continue
            stack.pop()
            env[top] = new.node_copy(top, env.__getitem__)
            if top.meta.get("layer") is not None:
                env[top].meta["runs_in"] = layer
    return new


def with_readers_first(graph: fx.Graph) -> fx.Graph:
    """`graph` itself where its order is right, else the same one with such readers moved before the reductions."""
    readers = earlier_readers(graph)
    order = {node: i for i, node in enumerate(graph.nodes)}
    if all(order[r] < order[node] for node, others in readers.items() for r in others):
        return graph
    computed = [n for n in graph.nodes if n.op != "placeholder"]
    return rescheduled(graph, computed, readers, order.__getitem__)


__all__ = ["IN_PLACE", "earlier_readers", "rescheduled", "with_readers_first"]

"""The part of a forward pass that keys and values need: what is left of a call whose logits nobody reads.

Attention of the last layer stores the keys and values of its tokens; its result, and all that follows it, is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from rewriter.ir import Body, Opaque, Program, args_of, nodes_inside, ops, reachable


def of_cache(program: Program, graph: fx.Graph) -> dict[fx.Node, bool]:
    """The nodes of `graph`, a wiring of `program`, that keys and values need, in its order: True where a node is
    needed in full, False for a module of which only the keys and values are (`of_keys`).

    A live module may keep a state: it is needed in full.
    """
    stores = [n for n in graph.nodes if n.op == "call_module" and _stores(program.modules[str(n.target)])]
    live = [n for n in graph.nodes if n.op == "call_module" and isinstance(program.modules[str(n.target)], Opaque)]
    needed = _before([x for node in stores for x in node.all_input_nodes] + live)
    return {node: node in needed for node in graph.nodes if node in needed or node in stores}


def of_keys(body: Body) -> list[fx.Node]:
    """The nodes of a body that the keys and values of its attention need, and the attention itself, in order. Of a
    module inside that has attention, all; recurrences in full, whose states follow from what they compute."""
    attention = [n for n in body.graph.nodes if n.target is ops.attention]
    recurrent = [n for n in body.graph.nodes if n.target in ops.RECURRENT]
    inside = [n for n in body.graph.nodes if n.op == "call_module" and _stores(body.modules[str(n.target)])]
    needed = _before([x for node in attention for x in args_of(node)[1:3]] + inside + recurrent)
    return [node for node in body.graph.nodes if node in needed or node in attention]


def _stores(module: object) -> bool:
    """True if a module has attention, which stores keys and values, or keeps a state."""
    return isinstance(module, Body) and any(node.target in ops.CACHED for _, node in nodes_inside(module, ""))


def _before(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """These nodes and all that they are computed from."""
    return set(reachable(nodes, lambda n: n.all_input_nodes))

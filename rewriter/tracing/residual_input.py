"""Bodies that end in `residual + branch`, where the residual is an input that nothing else reads."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from rewriter.analysis.residual import is_add
from rewriter.ir import Body, args_of, copy_graph


def residual_input(body: Body) -> int | None:
    """Which input of `body` its first result is the sum of and something else; None when there is none."""
    total = _first_result(body.graph)
    if not is_add(total) or len(total.users) != 1:
        return None
    inputs = [n for n in body.graph.nodes if n.op == "placeholder" and n.target != "ctx"]
    operands = [n for n in args_of(total) if isinstance(n, fx.Node)]
    found = [n for n in operands if n in inputs[1:] and len(n.users) == 1]
    return inputs.index(found[0]) if len(found) == 1 and len(operands) == 2 else None


def without_residual(body: Body, place: int) -> Body:
    """The same body without that input: what it adds to the residual."""
    graph, _ = copy_graph(body.graph)
    total = _first_result(graph)
    residual = [n for n in graph.nodes if n.op == "placeholder" and n.target != "ctx"][place]
    total.replace_all_uses_with(next(n for n in args_of(total) if n is not residual))
    graph.erase_node(total)
    graph.erase_node(residual)
    return replace(body, graph=graph, kept=tuple(k for i, k in enumerate(body.kept) if i != place))


def _first_result(graph: fx.Graph) -> fx.Node:
    result = args_of(graph.output_node())[0]
    return result if isinstance(result, fx.Node) else result[0]

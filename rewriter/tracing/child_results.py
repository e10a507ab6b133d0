"""Results of a layer's children that it uses, and children that end in an add of the stream."""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from rewriter.ir import Body, args_of, copy_graph
from rewriter.ir.residual import is_add


def holds_alone(module: nn.Module) -> bool:
    """True if a module holds parameters itself, and its children hold nothing."""
    own, children = list(module.parameters(recurse=False)), any(True for _ in module.children())
    held = len([*module.parameters(), *module.buffers()])
    return bool(own) and children and held == len(own)


def wanted_results(node: fx.Node, output: Any, handed: Collection[int]) -> tuple[int, ...] | None:
    """The tensors of those that a child returns which the layer uses, by their order; None: all of them.

    What a layer only returns next to its hidden state (attention weights) is not used, but in the places `handed`, of
    which later layers read.
    """
    if isinstance(output, torch.Tensor):
        return None
    users = list(node.users)
    if not all(u.target is operator.getitem and isinstance(args_of(u)[1], (int, slice)) for u in users):
        return None
    last = node.graph.output_node()
    result = args_of(last)[0]
    tensors = [i for i, item in enumerate(output) if isinstance(item, torch.Tensor)]
    used: set[int] = set()
    for user in users:
        read = not isinstance(result, (tuple, list)) or any(user is result[p] for p in (0, *handed))
        if read or set(user.users) != {last}:
            picked = range(len(output))[args_of(user)[1]]
            used |= {picked} if isinstance(picked, int) else set(picked)
    return tuple(p for p, i in enumerate(tensors) if i in used)


def results_by_place(output: Any, wanted: Collection[int] | None) -> dict[int, int] | None:
    if isinstance(output, torch.Tensor):
        return None
    tensors = [i for i, item in enumerate(output) if isinstance(item, torch.Tensor)]
    kept = range(len(tensors)) if wanted is None else sorted(w for w in wanted if w < len(tensors))
    return {tensors[p]: position for position, p in enumerate(kept)}


# --- children that end in an add of the stream


def residual_input(body: Body) -> int | None:
    """The input of `body` whose sum with something else is its first result; None when there is none."""
    total = _first_result(body.graph)
    if not is_add(total) or len(total.users) != 1:
        return None
    inputs = [n for n in body.graph.nodes if n.op == "placeholder" and n.target != "ctx"]
    operands = [n for n in args_of(total) if isinstance(n, fx.Node)]
    residuals = [n for n in operands if n in inputs[1:] and len(n.users) == 1]
    return inputs.index(residuals[0]) if len(residuals) == 1 and len(operands) == 2 else None


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

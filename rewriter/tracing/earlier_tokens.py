"""Zeros that a model puts in front of its tokens: once its cache has earlier tokens, their values stand there. A
forward without a cache shows the zeros; here they become `ops.preceded`, which keeps the values.

- `F.pad(x, (n, 0))`, and `cat([zeros, x])` of n zeros, are `preceded(x, n)`.
- `cat([zeros, x[:, :-m]])` delays x by m tokens: all but the last m of `preceded(x, n)`.
- `cat([W zeros, (W x)[:, :-m]])`, of one projection W, is W of the former: where the sequence begins, a bias is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from rewriter.ir import Leaf, Module, args_of, drop_dead_nodes, ops
from rewriter.ir.op_semantics import argument, aten, kind_of, operator_of
from rewriter.ir.residual import has_projection
from rewriter.tracing.attention_matching import context_of
from rewriter.tracing.functionalize import computed
from rewriter.tracing.token_mixing import tokens_beyond


def name_earlier_tokens(graph: fx.Graph, children: Mapping[str, Module]) -> None:
    """Rewrite the zeros in front of tokens in `graph`, in place; `children` are the modules that it calls."""
    for node in list(graph.nodes):
        if node.target is aten.cat.default:
            _project_once(node, children)
    for node in list(graph.nodes):
        found = _padded(node) or _delayed(node)
        if found is not None:
            source, dim, count, last = found
            new = _preceded(node, source, dim, count)
            if last:
                with graph.inserting_before(node):
                    new = computed(graph, aten.slice.Tensor, new, dim, 0, -last)
            node.replace_all_uses_with(new)
    drop_dead_nodes(graph)


def _preceded(before: fx.Node, source: fx.Node, dim: int, count: int) -> fx.Node:
    """`ops.preceded`, which takes [B, C, S], of a value whose tokens are along `dim`; its slot is numbered later."""
    graph, ctx = before.graph, context_of(before.graph)
    with graph.inserting_before(before):
        if dim == 1:
            source = computed(graph, aten.transpose.int, source, 1, 2)
        node = graph.call_function(ops.preceded, (source, ctx), {"slot": 0, "count": count})
        value = source.meta["val"]
        with value.fake_mode:
            node.meta["val"] = value.new_empty((*value.shape[:2], value.shape[2] + count))
        return computed(graph, aten.transpose.int, node, 1, 2) if dim == 1 else node


def _tokens_of(value: Any, dim: int) -> bool:
    """True if `dim` is where a value of three dimensions has its tokens."""
    return value.dim() == 3 and dim > 0 and (tokens_beyond(value.shape[dim]) or ("", -1))[1] == 0


def _padded(node: fx.Node) -> tuple[fx.Node, int, int, int] | None:
    """(x, its dimension of tokens, how many zeros are in front of them, 0) of a node that pads x."""
    if (
        kind_of(node) != "pad"
        or argument(node, "value") not in (None, 0)
        or argument(node, "mode")
        not in (
            None,
            "constant",
        )
    ):
        return None
    source, amounts = args_of(node)[:2]
    value = source.meta["val"]
    pairs = [(value.dim() - 1 - i, *pair) for i, pair in enumerate(zip(amounts[::2], amounts[1::2], strict=True))]
    moved = [(dim, front) for dim, front, behind in pairs if front or behind]
    if len(moved) != 1 or any(behind for *_, behind in pairs):
        return None
    [(dim, count)] = moved
    return (source, dim, count, 0) if isinstance(count, int) and count > 0 and _tokens_of(value, dim) else None


def _delayed(node: fx.Node) -> tuple[fx.Node, int, int, int] | None:
    """(x, its dimension of tokens, the number of zeros, of last tokens left out) of a node that joins zeros and x."""
    if node.target is not aten.cat.default or len(args_of(node)[0]) != 2:
        return None
    (zeros, source), dim = args_of(node)[0], argument(node, "dim") % node.meta["val"].dim()
    count, last = zeros.meta["val"].shape[dim], 0
    if not _is_zeros(zeros) or not isinstance(count, int) or zeros.meta["val"].dtype != source.meta["val"].dtype:
        return None
    if (piece := _without_last(source, dim)) is not None:
        source, last = piece
    return (source, dim, count, last) if 0 <= last <= count and _tokens_of(source.meta["val"], dim) else None


def _without_last(node: fx.Node, dim: int) -> tuple[fx.Node, int] | None:
    """(x, m) of x without its last m tokens."""
    if node.target is not aten.slice.Tensor or argument(node, "dim") % node.meta["val"].dim() != dim:
        return None
    start, end = argument(node, "start"), argument(node, "end")
    if start not in (None, 0) or argument(node, "step") != 1 or not isinstance(end, int) or end >= 0:
        return None
    return args_of(node)[0], -end


def _is_zeros(node: fx.Node) -> bool:
    row = operator_of(node)
    return row is not None and row.creates and row.fill == 0.0


def _project_once(cat: fx.Node, children: Mapping[str, Module]) -> None:
    """Let one projection of zeros and of tokens, which `cat` joins, be the projection of both joined."""
    graph, value = cat.graph, cat.meta["val"]
    dim = argument(cat, "dim") % value.dim()
    parts = [(piece, _without_last(piece, dim)) for piece in args_of(cat)[0]]
    calls = [piece if cut is None else cut[0] for piece, cut in parts]
    names = {str(n.target) for n in calls if n.op == "call_module"}
    if len(names) != 1 or any(n.op != "call_module" for n in calls) or dim == value.dim() - 1:
        return
    [name] = names
    module = children[name]
    if not isinstance(module, Leaf) or not has_projection(module) or not any(_is_zeros(args_of(n)[0]) for n in calls):
        return
    with graph.inserting_before(cat):
        pieces = [args_of(n)[0] for n in calls]
        for i, (_, cut) in enumerate(parts):
            if cut is not None:
                pieces[i] = computed(graph, aten.slice.Tensor, pieces[i], dim, 0, -cut[1])
        joined = computed(graph, aten.cat.default, pieces, dim)
        projected = graph.call_module(name, (joined,))
    with value.fake_mode:
        projected.meta["val"] = torch.empty_like(value)
    cat.replace_all_uses_with(projected)

"""Attention to keys that an indexer chose, as a cache can hold it (DeepSeek sparse attention, arXiv 2512.02556).

As traced, an indexer scores every key of the call with every query, [B, S, S], adds the mask, and takes the places of
the best. Here these scores are found, the keys that they are computed of become `ops.remember`, so that a later call
scores those of earlier tokens too, and the choice becomes `ops.top_keys`, which knows the rule of the mask.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from rewriter.common.errors import RewriterError
from rewriter.ir import args_of, ops
from rewriter.ir.op_semantics import argument, aten, is_pointwise, kind_of
from rewriter.tracing.attention_scores import Scores, UnknownScores, is_matmul
from rewriter.tracing.masks import StaticGraph


def choose_keys(attention: fx.Node, static: StaticGraph) -> None:
    """Rewrite what computes `keys` of an attention node, in place. Raises RewriterError where it is another form.

    Where an earlier layer chose them, they are an input, and stay it.
    """
    traced: Any = _uncast(attention.kwargs["keys"])
    if traced.op == "placeholder":
        attention.kwargs = {**attention.kwargs, "keys": traced}
        return
    try:
        scores, count = _choice(traced)
        parts = Scores(static)
        parts.add_terms(scores, 1.0, False)
        rule, terms = parts.rule()
        if len(terms) != 1 or terms[0].factor != 1.0:
            raise UnknownScores
        raw = terms[0].node
        reader, keys = _keys(raw, 2, raw)
    except UnknownScores as error:
        raise RewriterError(
            "its attention sees keys that are chosen in a way that this version cannot follow (expected: the places of "
            "the largest sums of scores and a mask)"
        ) from error
    graph, ctx = attention.graph, args_of(attention)[3]
    with graph.inserting_after(keys):
        kept = graph.call_function(ops.remember, (keys, ctx), {"slot": 0})
    kept.meta["val"] = keys.meta["val"]
    reader.replace_input_with(keys, kept)
    with graph.inserting_before(attention):
        options: dict[str, Any] = {"mask": rule, "count": count}
        chosen = graph.call_function(ops.top_keys, (raw, ctx), options)
    chosen.meta["val"] = traced.meta["val"].to(torch.int64)
    attention.kwargs = {**attention.kwargs, "keys": chosen}
    for cast in (*_casts(traced), traced):  # what a layer hands on to later ones
        cast.replace_all_uses_with(chosen, delete_user_cb=lambda user: user.op == "output")


def _uncast(value: Any) -> Any:
    while isinstance(value, fx.Node) and kind_of(value) == "cast":
        value = args_of(value)[0]
    return value


def _casts(node: fx.Node) -> list[fx.Node]:
    """The casts of a value, and theirs."""
    return [cast for user in node.users if kind_of(user) == "cast" for cast in (*_casts(user), user)]


def _choice(places: Any) -> tuple[fx.Node, int]:
    """(scores, number) of the places of the largest scores."""
    if not isinstance(places, fx.Node) or places.target is not operator.getitem or args_of(places)[1] != 1:
        raise UnknownScores
    top = args_of(places)[0]
    if top.target is not aten.topk.default or argument(top, "dim") not in (-1, 2) or not argument(top, "largest"):
        raise UnknownScores
    scores, count = args_of(top)[:2]
    if isinstance(count, fx.Node) and count.target is torch.sym_min:  # no more than there are
        count = next((n for n in args_of(count) if isinstance(n, int)), None)
    if not isinstance(count, int) or scores.meta["val"].dim() != 3:
        raise UnknownScores
    return scores, count


def _keys(node: fx.Node, dim: int, reader: fx.Node) -> tuple[fx.Node, fx.Node]:
    """(node, the value [B, T, D] that it reads) from which dimension `dim` of `node` comes: that of the keys."""
    value, args = node.meta["val"], args_of(node)
    if dim == 1 and value.dim() == 3:
        return reader, node
    if is_matmul(node) and dim == value.dim() - 1:
        return _keys(args[1], args[1].meta["val"].dim() - 1, node)
    if node.target is aten.transpose.int:
        first, second = (d % value.dim() for d in args[1:3])
        return _keys(args[0], {first: second, second: first}.get(dim, dim), node)
    if node.target is aten.unsqueeze.default:
        added = args[1] % value.dim()
        return _keys(args[0], dim - (added < dim), node)
    if node.target is aten.squeeze.dim:
        gone = args[1] % (value.dim() + 1)
        return _keys(args[0], dim + (gone <= dim), node)
    if is_pointwise(node):
        behind = value.dim() - dim
        sized = [n for n in node.all_input_nodes if _size(n, behind) == str(value.shape[dim])]
        if len(sized) == 1:
            return _keys(sized[0], sized[0].meta["val"].dim() - behind, node)
    raise UnknownScores


def _size(node: fx.Node, behind: int) -> str:
    """The size of the dimension that is `behind` from the end; "" without one."""
    value = node.meta["val"]
    return str(value.shape[-behind]) if isinstance(value, torch.Tensor) and value.dim() >= behind else ""

"""Attention written out by hand, found again in a body: softmax(scale · q kᵀ + mask + bias) v becomes `ops.attention`.

About 25 types of transformers compute their scores with their own matmuls. `attention_scores` reads the scores;
here the values are found and heads are brought into the IR's layout. Attention that is not recognised stays as it is:
plain glue, exact for full sequences. What attention of the interface adds to its scores is read as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from rewriter.common.errors import RewriterError
from rewriter.ir import args_of, drop_dead_nodes, ops
from rewriter.ir.labels import Labels, Unsplittable, reduced_shape
from rewriter.ir.op_semantics import aten, function_of, is_movement, kind_of
from rewriter.tracing.attention_scores import Scores, Term, UnknownScores, folds, is_matmul, is_same, is_view, shape_of
from rewriter.tracing.functionalize import computed
from rewriter.tracing.indexers import choose_keys
from rewriter.tracing.key_blocks import attend_to_blocks
from rewriter.tracing.masks import StaticGraph
from rewriter.tracing.score_biases import is_key_mask, require_scaled

_END = 1 << 62  # of a slice that has none


def recognise(graph: fx.Graph, static: StaticGraph, used: dict[str, torch.Tensor | None]) -> None:
    """Rewrite `graph` in place. Every attention node gets its rule, and what keeps something between tokens its slot;
    `ctx` is added where it is needed, and a constant that the graph comes to read to `used`."""
    replaced = False
    for node in list(graph.nodes):
        if node.target is ops.attention:
            of_blocks = attend_to_blocks(node)
            _take_key_mask(node)
            _separate(node, static, used)
            if "by_distance" in node.kwargs:
                require_scaled(node.kwargs["by_distance"])
            if not of_blocks and "keys" in node.kwargs:
                choose_keys(node, static)
        elif function_of(node) == "softmax":
            try:
                _replace(node, static, used)
                replaced = True
            except UnknownScores:
                continue
    drop_dead_nodes(graph)
    if any(map(is_key_mask, graph.nodes)):
        raise RewriterError("a dynamic mask is no mask of attention. Its attention cannot be traced")
    if replaced:
        _fold_views(graph)
        drop_dead_nodes(graph)
    for slot, node in enumerate(n for n in graph.nodes if n.target in ops.CACHED):
        node.kwargs = {**node.kwargs, "slot": slot}


def context_of(graph: fx.Graph) -> fx.Node:
    """The placeholder of the context, after the others."""
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    if placeholders and placeholders[-1].target == "ctx":
        return placeholders[-1]
    with graph.inserting_after(placeholders[-1]):
        return graph.placeholder("ctx")


# --- attention of the interface: its mask argument is a sum of masks and biases ------------------------------------


def _separate(node: fx.Node, static: StaticGraph, used: dict[str, torch.Tensor | None]) -> None:
    mask = node.kwargs.get("bias")
    if not isinstance(mask, fx.Node):
        return
    scores = Scores(static)
    scores.add_terms(mask, 1.0, False)
    rule, biases = scores.rule()
    options: dict[str, Any] = {k: v for k, v in node.kwargs.items() if k != "bias"} | {"mask": rule}
    with node.graph.inserting_before(node):
        node.kwargs = options | _bias(node.graph, scores, biases, int(node.meta["val"].shape[1]), used)


def _take_key_mask(attention: fx.Node) -> None:
    """Let attention read the bias of each key, which a cache keeps, and the mask that a dynamic mask was made of."""
    given: Any = attention.kwargs.get("bias")
    made = given
    while isinstance(made, fx.Node) and is_movement(made):
        made = args_of(made)[0]
    if not isinstance(made, fx.Node) or not is_key_mask(made):
        return
    graph, (_, k, _, ctx), (key_bias, mask, kept) = attention.graph, args_of(attention)[:4], args_of(made)
    heads, kv_heads = (int(n.meta["val"].shape[1]) for n in (attention, k))
    repeated = _repeats(graph, given, heads)
    if repeated * key_bias.meta["val"].shape[1] != heads or repeated * kv_heads != heads:
        raise RewriterError(f"a dynamic mask is for other than the {kv_heads} key/value heads of its attention")
    with graph.inserting_before(attention):
        by_token = _transposed(graph, key_bias)
        remembered = graph.call_function(ops.remember, (by_token, ctx), {"slot": 0})
        remembered.meta["val"] = by_token.meta["val"]
        all_of_it = computed(graph, aten.transpose.int, remembered, 1, 2)
    attention.kwargs = {**attention.kwargs, "bias": mask, "key_bias": all_of_it, "kept": kept}


# --- attention written out -----------------------------------------------------------------------------------------


def _replace(softmax: fx.Node, static: StaticGraph, used: dict[str, torch.Tensor | None]) -> None:
    value = softmax.meta["val"]
    if args_of(softmax)[1] not in (-1, value.dim() - 1) or value.dim() not in (3, 4):
        raise UnknownScores
    product, v = _weighted(softmax)
    scores = Scores(static)
    scores.read(args_of(softmax)[0], 1.0, value.dim() == 3)
    if scores.operands is None:
        raise UnknownScores
    rule, biases = scores.rule()
    graph = product.graph
    with graph.inserting_before(product):
        # as [B, H, length, size], key/value heads once each
        folded = (scores.operands[0], _transposed(graph, scores.operands[1]), v)
        apart = [x for n in folded if (x := n if n.meta["val"].dim() == 4 else _unfolded(n)) is not None]
        if len(apart) < 3:
            raise UnknownScores
        q, k, v = apart
        if any(not isinstance(x.meta["val"].shape[1], int) for x in (q, k, v)):
            raise UnknownScores
        heads = int(q.meta["val"].shape[1])
        k, v = _distinct(graph, k, v, heads)
        options: dict[str, Any] = {"slot": 0, "mask": rule, "scale": scores.scale}
        if scores.softcap is not None:
            options["softcap"] = scores.softcap
        options |= _bias(graph, scores, biases, heads, used)
        out = graph.call_function(ops.attention, (q, k, v, context_of(graph)), options)
        batch, length = q.meta["val"].shape[0], q.meta["val"].shape[2]
        out.meta["val"] = q.meta["val"].new_empty(batch, heads, length, v.meta["val"].shape[-1])
        result = out
        if product.meta["val"].dim() == 3:
            result = graph.call_function(aten.flatten.using_ints, (out, 0, 1))
            result.meta["val"] = product.meta["val"]
    product.replace_all_uses_with(result)


def _weighted(softmax: fx.Node) -> tuple[fx.Node, fx.Node]:
    """(the product of the weights with the values, the values)."""
    node = softmax
    for _ in range(8):
        users = [u for u in node.users if u.op == "call_function" and kind_of(u) != "size"]
        products = [u for u in users if is_matmul(u) and args_of(u)[0] is node]
        if len(products) == 1:
            if products[0].meta["val"].dim() not in (3, 4):
                raise UnknownScores
            return products[0], args_of(products[0])[1]
        onward = [u for u in users if is_same(u) or (is_view(u) and folds(node, u))]
        if len(onward) != 1 or args_of(onward[0])[0] is not node:
            raise UnknownScores
        node = onward[0]
    raise UnknownScores


# --- biases --------------------------------------------------------------------------------------------------------


def _bias(
    graph: fx.Graph, scores: Scores, terms: Sequence[Term], heads: int, used: dict[str, torch.Tensor | None]
) -> dict[str, Any]:
    """The options `slopes` and `bias`: the latter is the sum of the terms that are none of the former, each [1 or B, 1
    or H, 1 or S, T]; neither without terms."""
    slopes, terms = scores.slopes(terms, heads)
    options: dict[str, Any] = {}
    if slopes is not None:
        name = next(n for n in _slope_names() if n not in used)
        used[name] = slopes
        options["slopes"] = graph.get_attr(name)
        options["slopes"].meta["val"] = slopes
    total: fx.Node | None = None
    for term in terms:
        node, value = term.node, term.node.meta["val"]
        if term.folded and value.dim() == 3 and str(value.shape[0]) != "1":
            node = _unfolded(node, heads) or computed(graph, aten.unflatten.int, node, 0, [-1, heads])
        if term.factor != 1.0:
            node = computed(graph, aten.mul.Tensor, node, term.factor)
        total = node if total is None else computed(graph, aten.add.Tensor, total, node)
    return options if total is None else {**options, "bias": total}


def _slope_names() -> Iterator[str]:
    yield from ("slopes" if i == 0 else f"slopes_{i}" for i in itertools.count())


# --- heads ---------------------------------------------------------------------------------------------------------


def _unfolded(node: fx.Node, heads: int | None = None) -> fx.Node | None:
    """The value [B, H, …] that `node` [B · H, …] is a view of."""
    shape, source = shape_of(node), node
    while is_view(source):
        source = args_of(source)[0]
        sizes = shape_of(source)
        if len(sizes) == 4 and sizes[2:] == shape[1:] and heads in (None, source.meta["val"].shape[1]):
            return source
    return None


def _transposed(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """k of kᵀ; a fold of heads around the transposition is looked through."""
    rank = node.meta["val"].dim()
    if node.target is aten.transpose.int and {d % rank for d in args_of(node)[1:3]} == {rank - 2, rank - 1}:
        return args_of(node)[0]
    if rank == 3 and (apart := _unfolded(node)) is not None:
        node = apart
        if node.target is aten.transpose.int and {d % 4 for d in args_of(node)[1:3]} == {2, 3}:
            return args_of(node)[0]
    return computed(graph, aten.transpose.int, node, -1, -2)


def _distinct(graph: fx.Graph, k: fx.Node, v: fx.Node, heads: int) -> tuple[fx.Node, fx.Node]:
    """k and v with each key/value head once, where the model repeated them for its query heads."""
    times = _repeats(graph, k, heads)
    if times == 1 or _repeats(graph, v, heads) != times:
        return k, v
    k, v = (computed(graph, aten.slice.Tensor, node, 1, 0, _END, times) for node in (k, v))
    return k, v


def _repeats(graph: fx.Graph, node: fx.Node, heads: int) -> int:
    """Number of times that each head of k or v [B, H, T, D] stands there, one after the other."""
    if node.meta["val"].shape[1] != heads:
        return 1
    labels = Labels(graph)
    for spread in graph.nodes:
        if spread.target in (aten.expand.default, aten.repeat_interleave.self_int):
            source = args_of(spread)[0]
            shape = reduced_shape(source.meta["val"])
            rows = torch.arange(math.prod(shape[:-1])).reshape(*shape[:-1], 1)  # rotations mix the last dimension
            labels.set(source, rows.expand(shape).clone())
    try:
        for each in graph.nodes:
            if each.op == "call_function" and labels.of.get(each) is None:
                labels.forward(each)
    except Unsplittable:
        return 1
    heads_of = labels.of.get(node)
    if heads_of is None:
        return 1
    rows = heads_of[0, :, 0]
    if (rows == -1).any():
        return 1
    fits = (n for n in range(heads, 1, -1) if heads % n == 0 and torch.equal(rows, rows[::n].repeat_interleave(n, 0)))
    return next(fits, 1)


def _fold_views(graph: fx.Graph) -> None:
    """A chain of views that ends in a shape it had before is no change. What is in memory after the others may have
    another layout than before, so none of them insists on one."""
    for node in list(graph.nodes):
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
        if kind_of(node) != "view":
            continue
        source = node
        while is_view(source):
            source = args_of(source)[0]
            if shape_of(source) == shape_of(node) and source.meta["val"].dtype == node.meta["val"].dtype:
                node.replace_all_uses_with(source)
                break

"""Attention written out by hand, found again in a body: softmax(scale · q kᵀ + mask + bias) v becomes `ops.attention`.

About 25 types of transformers compute their scores with matmuls of their own. What they differ in - where the scale is
applied, `baddbmm`, heads folded into the batch, casts, masks that are added, filled in or multiplied with - does not
change the meaning, so the scores are read as a sum: one product q kᵀ, and terms. A term that depends on lengths and
constants alone is evaluated, and what it hides becomes a MaskSpec; everything else is a position bias.

Attention that is not recognised stays as it is: plain glue, exact for whole sequences.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from rewriter import ops
from rewriter.analysis.labels import Labels, Unsplittable, reduced_shape
from rewriter.ir import args_of, drop_dead_nodes
from rewriter.ops import MaskSpec
from rewriter.tracing.masks import HIDDEN, Static, StaticGraph, seen_by

aten = torch.ops.aten

_SOFTMAX = (aten.softmax.int, aten._softmax.default)
_MATMUL = (aten.matmul.default, aten.bmm.default)
_FLOORS = (aten.maximum.default, aten.max.other, aten.clamp.default, aten.clamp_min.default)
_END = 1 << 62  # of a slice that has none
_SAME = (ops.type_as_model, aten.to.dtype, aten.contiguous.default, aten.clone.default)
# operators between the product of queries and keys and the softmax
_ON_SCORES = frozenset(
    {
        aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar, aten.add.Tensor, aten.sub.Tensor,
        aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.where.self, aten.where.ScalarOther,
        aten.where.ScalarSelf, aten.tanh.default, *_FLOORS,
    }
)  # fmt: skip
_VIEWS = frozenset(
    {
        aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints,
        aten.unflatten.int, aten.unsqueeze.default, aten.squeeze.dim, aten.contiguous.default,
    }
)  # fmt: skip


class _Unknown(Exception):
    """These scores are none that this module reads."""


@dataclasses.dataclass
class _Term:
    """`factor` · `node` of the scores; `folded` says that heads are folded into its batch dimension."""

    node: fx.Node
    factor: float
    folded: bool


@dataclasses.dataclass
class _Scores:
    """Scores taken apart. `fills` are (condition, the truth value that hides), `zeroed` are 0/1 factors."""

    product: fx.Node | None = None
    operands: tuple[fx.Node, fx.Node] | None = None
    scale: float = 1.0
    softcap: float | None = None
    folded: bool = False
    terms: list[_Term] = dataclasses.field(default_factory=list)
    fills: list[tuple[fx.Node, bool]] = dataclasses.field(default_factory=list)
    zeroed: list[fx.Node] = dataclasses.field(default_factory=list)


def recognise(graph: fx.Graph, static: StaticGraph) -> None:
    """Rewrite `graph` in place. Every attention node gets its rule and its slot; `ctx` is added where it is needed."""
    replaced = False
    for node in list(graph.nodes):
        if node.target is ops.attention:
            _separate(node, static)
        elif node.target in _SOFTMAX:
            try:
                _replace(node, static)
                replaced = True
            except _Unknown:
                continue
    drop_dead_nodes(graph)
    if replaced:
        _fold_views(graph)
        drop_dead_nodes(graph)
    for slot, node in enumerate(n for n in graph.nodes if n.target is ops.attention):
        node.kwargs = {**node.kwargs, "slot": slot}


def _context(graph: fx.Graph) -> fx.Node:
    """The placeholder of the context, behind the others."""
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    if placeholders and placeholders[-1].target == "ctx":
        return placeholders[-1]
    with graph.inserting_after(placeholders[-1]):
        return graph.placeholder("ctx")


# --- attention of the interface: its mask argument is a sum of masks and biases ------------------------------------


def _separate(node: fx.Node, static: StaticGraph) -> None:
    mask = node.kwargs.get("bias")
    if not isinstance(mask, fx.Node):
        return
    scores = _Scores()
    _sum(mask, 1.0, False, scores, static)
    rule, biases = _rule(scores, static)
    options: dict[str, Any] = {k: v for k, v in node.kwargs.items() if k != "bias"} | {"mask": rule}
    with node.graph.inserting_before(node):
        bias = _bias(node.graph, biases, int(node.meta["val"].shape[1]))
    node.kwargs = options if bias is None else options | {"bias": bias}


# --- attention written out -----------------------------------------------------------------------------------------


def _replace(softmax: fx.Node, static: StaticGraph) -> None:
    value = softmax.meta["val"]
    if args_of(softmax)[1] not in (-1, value.dim() - 1) or value.dim() not in (3, 4):
        raise _Unknown
    product, v = _weighted(softmax)
    scores = _Scores()
    _take_apart(args_of(softmax)[0], 1.0, value.dim() == 3, scores, static)
    if scores.operands is None or scores.product is None:
        raise _Unknown
    rule, biases = _rule(scores, static)
    graph = product.graph
    with graph.inserting_before(product):
        q = _heads_apart(scores.operands[0])
        heads = int(q.meta["val"].shape[1])
        k = _transposed(graph, scores.operands[1])
        k, v = _heads_apart(k), _heads_apart(v)
        if any(not isinstance(x.meta["val"].shape[1], int) for x in (q, k, v)):
            raise _Unknown
        k, v = _distinct(graph, k, v, heads)
        bias = _bias(graph, biases, heads)
        options: dict[str, Any] = {"slot": 0, "mask": rule, "scale": scores.scale}
        if scores.softcap is not None:
            options["softcap"] = scores.softcap
        if bias is not None:
            options["bias"] = bias
        out = graph.call_function(ops.attention, (q, k, v, _context(graph)), options)
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
        users = [u for u in node.users if u.op == "call_function" and u.target is not aten.sym_size.int]
        products = [u for u in users if u.target in _MATMUL and args_of(u)[0] is node]
        if len(products) == 1:
            value = products[0].meta["val"]
            if value.dim() not in (3, 4):
                raise _Unknown
            return products[0], args_of(products[0])[1]
        onward = [u for u in users if u.target in _SAME or (u.target in _VIEWS and _folds(node, u)) or _is_copy(u)]
        if len(onward) != 1 or args_of(onward[0])[0] is not node:
            raise _Unknown
        node = onward[0]
    raise _Unknown


def _is_copy(node: fx.Node) -> bool:
    """An expand to the shape that is there already."""
    source = args_of(node)[0]
    return node.target is aten.expand.default and _shape(source) == _shape(node)


def _shape(node: fx.Node) -> tuple[str, ...]:
    return tuple(map(str, node.meta["val"].shape))


def _folds(before: fx.Node, after: fx.Node) -> bool:
    """Whether a view only folds heads into the batch, takes them apart again, or changes nothing."""
    a, b = _shape(before), _shape(after)
    return a == b or ({len(a), len(b)} == {3, 4} and a[-2:] == b[-2:])


def _take_apart(node: Any, factor: float, folded: bool, scores: _Scores, static: StaticGraph) -> None:
    """Add what `factor` · `node` is made of to `scores`. `node` holds the product q kᵀ."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or scores.product is not None:
        raise _Unknown
    target, args = node.target, args_of(node)
    if target in _SAME or _is_copy(node):
        _take_apart(args[0], factor, folded, scores, static)
    elif target in _VIEWS:
        if not _folds(args[0], node):
            raise _Unknown
        _take_apart(args[0], factor, args[0].meta["val"].dim() == 3, scores, static)
    elif target in (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar):
        if (number := _number(args[1], static)) is not None:
            scaled = factor / number if target in (aten.div.Tensor, aten.div.Scalar) else factor * number
            if target is aten.mul.Tensor and (capped := _capped(args[0], number, static)) is not None:
                if scores.softcap is not None or factor != 1.0:
                    raise _Unknown
                before = (len(scores.terms), len(scores.fills))
                _take_apart(capped, 1.0, folded, scores, static)
                if before[0] != len(scores.terms) or before[1] != len(scores.fills):
                    raise _Unknown  # a cap around a mask is no cap of scores
                scores.softcap = number
                return
            _take_apart(args[0], scaled, folded, scores, static)
        elif target is aten.mul.Tensor:
            content, other = _content(args[0], args[1])
            if static.of(other) is None:
                raise _Unknown
            scores.zeroed.append(other)
            _take_apart(content, factor, folded, scores, static)
        else:
            raise _Unknown
    elif target in (aten.add.Tensor, aten.sub.Tensor):
        alpha = _option(node, "alpha")
        sign = -alpha if target is aten.sub.Tensor else alpha
        content, other = _content(args[0], args[1])
        own, others = (1.0, sign) if content is args[0] else (sign, 1.0)
        _sum(other, factor * others, folded, scores, static)
        _take_apart(content, factor * own, folded, scores, static)
    elif target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        _fill(args[1], True, args[2], factor, scores, static)
        _take_apart(args[0], factor, folded, scores, static)
    elif target in _FLOORS:  # a floor under what is hidden
        floor = _number(args[1], static)
        if floor is None or floor > HIDDEN:
            raise _Unknown
        _take_apart(args[0], factor, folded, scores, static)
    elif target in (aten.where.ScalarOther, aten.where.ScalarSelf):
        first = target is aten.where.ScalarOther
        _fill(args[0], not first, args[2 if first else 1], factor, scores, static)
        _take_apart(args[1 if first else 2], factor, folded, scores, static)
    elif target is aten.where.self:
        content, other = _content(args[1], args[2])
        _fill(args[0], content is args[2], other, factor, scores, static)
        _take_apart(content, factor, folded, scores, static)
    elif target is aten.baddbmm.default:
        beta, alpha = _option(node, "beta"), _option(node, "alpha")
        if beta and not _is_zero(args[0], static):
            scores.terms.append(_Term(args[0], factor * beta, folded))
        scores.product, scores.operands, scores.scale, scores.folded = node, args[1:3], factor * alpha, True
    elif target in _MATMUL:
        scores.product, scores.operands, scores.scale = node, args[:2], factor
        scores.folded = node.meta["val"].dim() == 3
    else:
        raise _Unknown


def _option(node: fx.Node, name: str) -> float:
    """A factor among the keywords of an operator, 1 by default."""
    value: Any = node.kwargs.get(name, 1)
    return float(value)


def _content(a: Any, b: Any) -> tuple[fx.Node, fx.Node]:
    """(the operand that holds the product of queries and keys, the other one)."""
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        raise _Unknown
    holds = [_holds_product(a), _holds_product(b)]
    if holds[0] == holds[1]:
        raise _Unknown
    return (a, b) if holds[0] else (b, a)


def _holds_product(node: Any) -> bool:
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    if node.target in (*_MATMUL, aten.baddbmm.default):
        return True
    through = node.target in _SAME or node.target in _VIEWS or _is_copy(node)
    if through or node.target in _ON_SCORES:
        return any(_holds_product(n) for n in node.all_input_nodes)
    return False


def _number(x: Any, static: StaticGraph) -> float | None:
    """A Python number, or a static tensor of one element, as a number."""
    if isinstance(x, (int, float)):
        return float(x)
    found = static.of(x) if isinstance(x, fx.Node) else None
    if found is None or x.meta["val"].dim() != 0 or found.masks:
        return None
    values = {float(found.evaluate(length, None)) for length in (5, 7)}
    return values.pop() if len(values) == 1 else None


def _is_zero(node: fx.Node, static: StaticGraph) -> bool:
    found = static.of(node)
    return found is not None and not found.masks and not found.evaluate(5, None).any()


def _capped(node: Any, cap: float, static: StaticGraph) -> fx.Node | None:
    """x, where `node` is tanh(x / cap)."""
    while isinstance(node, fx.Node) and node.target in _SAME:
        node = args_of(node)[0]
    if not isinstance(node, fx.Node) or node.target is not aten.tanh.default:
        return None
    inner = args_of(node)[0]
    while isinstance(inner, fx.Node) and inner.target in _SAME:
        inner = args_of(inner)[0]
    if inner.target not in (aten.div.Tensor, aten.div.Scalar) or _number(args_of(inner)[1], static) != cap:
        raise _Unknown
    source = args_of(inner)[0]
    return source if isinstance(source, fx.Node) else None


def _fill(condition: Any, hides: bool, value: Any, factor: float, scores: _Scores, static: StaticGraph) -> None:
    number = _number(value, static)
    if number is None or factor * number > HIDDEN or scores.softcap is not None:
        raise _Unknown
    scores.fills.append((condition, hides))


def _sum(node: fx.Node, factor: float, folded: bool, scores: _Scores, static: StaticGraph) -> None:
    """The summands of an operand that holds no product of queries and keys."""
    plain = node.op == "call_function" and node.target is aten.add.Tensor and not node.kwargs
    if plain and all(isinstance(n, fx.Node) and _shape(n) == _shape(node) for n in args_of(node)):
        for summand in args_of(node):
            _sum(summand, factor, folded, scores, static)
        return
    scores.terms.append(_Term(node, factor, folded))


# --- masks and biases ----------------------------------------------------------------------------------------------


def _rule(scores: _Scores, static: StaticGraph) -> tuple[MaskSpec, list[_Term]]:
    """(what may be seen, the terms that are biases)."""
    rule: MaskSpec | None = MaskSpec("bidirectional")
    biases: list[_Term] = []
    for condition, hides in scores.fills:
        found = static.of(condition)
        shown = None if found is None else seen_by(_hidden_by_fill(found, hides), found)
        if shown is None or rule is None:
            raise _Unknown  # what is filled in cannot be told from what is seen
        rule = rule.intersection(shown)
    for term in scores.terms:
        found = static.of(term.node)
        shown = None if found is None else seen_by(_hidden_by_term(found, term.factor), found)
        both = None if shown is None or rule is None else rule.intersection(shown)
        if found is None or both is None:
            biases.append(term)  # with all it hides: -1e38 added hides as well as a rule does
            continue
        rule = both
        if not _only_hides(found, term.factor):
            biases.append(term)
    if rule is None:
        raise _Unknown
    for factor in scores.zeroed:
        found = static.of(factor)
        shown = None if found is None else seen_by(_hidden_by_zero(found), found)
        if shown is None or rule.intersection(shown) != rule:
            raise _Unknown
    return rule, biases


def _hidden_by_fill(value: Static, hides: bool) -> Any:
    return lambda length, stand_in: value.evaluate(length, stand_in).bool() == hides


def _hidden_by_term(value: Static, factor: float) -> Any:
    return lambda length, stand_in: value.evaluate(length, stand_in) * factor <= HIDDEN


def _hidden_by_zero(value: Static) -> Any:
    def hidden(length: int, stand_in: MaskSpec | None) -> torch.Tensor:
        found = value.evaluate(length, stand_in)
        if not ((found == 0) | (found == 1)).all():
            raise _Unknown
        return found == 0

    return hidden


def _only_hides(value: Static, factor: float) -> bool:
    """Whether a term is 0 wherever it does not hide."""
    for length in (1, 21):
        found = value.evaluate(length, None) * factor
        if ((found != 0) & (found > HIDDEN)).any():
            return False
    return True


def _bias(graph: fx.Graph, terms: Sequence[_Term], heads: int) -> fx.Node | None:
    """The sum of the terms, each [1 or B, 1 or H, 1 or S, T]."""
    total: fx.Node | None = None
    for term in terms:
        node, value = term.node, term.node.meta["val"]
        if term.folded and value.dim() == 3 and str(value.shape[0]) != "1":
            source = _unfolded(node, heads)
            if source is None:
                source = graph.call_function(aten.unflatten.int, (node, 0, [-1, heads]))
                source.meta["val"] = value.unflatten(0, [-1, heads])
            node = source
        if term.factor != 1.0:
            value = node.meta["val"]
            node = graph.call_function(aten.mul.Tensor, (node, term.factor))
            node.meta["val"] = value
        if total is None:
            total = node
        else:
            value = total.meta["val"] + node.meta["val"]
            total = graph.call_function(aten.add.Tensor, (total, node))
            total.meta["val"] = value
    return total


# --- heads ---------------------------------------------------------------------------------------------------------


def _unfolded(node: fx.Node, heads: int | None = None) -> fx.Node | None:
    """The value [B, H, …] that `node` [B · H, …] is a view of."""
    shape, source = _shape(node), node
    while source.op == "call_function" and source.target in _VIEWS:
        source = args_of(source)[0]
        found = _shape(source)
        if len(found) == 4 and found[2:] == shape[1:] and heads in (None, source.meta["val"].shape[1]):
            return source
    return None


def _heads_apart(node: fx.Node) -> fx.Node:
    """q, k or v as [B, H, length, size]."""
    if node.meta["val"].dim() == 4:
        return node
    found = _unfolded(node)
    if found is None:
        raise _Unknown
    return found


def _transposed(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """k of kᵀ; a fold of heads around the transposition is looked through."""
    rank = node.meta["val"].dim()
    if node.target is aten.transpose.int and {d % rank for d in args_of(node)[1:3]} == {rank - 2, rank - 1}:
        return args_of(node)[0]
    if rank == 3 and (apart := _unfolded(node)) is not None:
        node = apart
        if node.target is aten.transpose.int and {d % 4 for d in args_of(node)[1:3]} == {2, 3}:
            return args_of(node)[0]
    value = node.meta["val"].transpose(-1, -2)
    node = graph.call_function(aten.transpose.int, (node, -1, -2))
    node.meta["val"] = value
    return node


def _distinct(graph: fx.Graph, k: fx.Node, v: fx.Node, heads: int) -> tuple[fx.Node, fx.Node]:
    """k and v with each key/value head once, where the model repeated them for its query heads."""
    times = _repeats(graph, k, heads)
    if times == 1 or _repeats(graph, v, heads) != times:
        return k, v
    picked = []
    for node in (k, v):
        one = graph.call_function(aten.slice.Tensor, (node, 1, 0, _END, times))
        one.meta["val"] = node.meta["val"][:, ::times]
        picked.append(one)
    return picked[0], picked[1]


def _repeats(graph: fx.Graph, node: fx.Node, heads: int) -> int:
    """How often each head of k or v [B, H, T, D] stands there, one after the other."""
    if node.meta["val"].shape[1] != heads:
        return 1
    labels = Labels(graph)
    for spread in graph.nodes:
        if spread.target in (aten.expand.default, aten.repeat_interleave.self_int):
            source = args_of(spread)[0]
            shape = reduced_shape(source.meta["val"])
            rows = torch.arange(math.prod(shape[:-1])).reshape(*shape[:-1], 1)  # rotations mix what lies along the last
            labels.set(source, rows.expand(shape).clone())
    try:
        for each in graph.nodes:
            if each.op == "call_function" and labels.get(each) is None:
                labels.forward(each)
    except Unsplittable:
        return 1
    found = labels.get(node)
    if found is None:
        return 1
    rows = found[0, :, 0]
    if (rows == -1).any():
        return 1
    fits = (n for n in range(heads, 1, -1) if heads % n == 0 and torch.equal(rows, rows[::n].repeat_interleave(n, 0)))
    return next(fits, 1)


def _fold_views(graph: fx.Graph) -> None:
    """A chain of views that ends in a shape it had before is no change. What is in memory behind the others may have
    another layout than before, so none of them insists on one."""
    for node in list(graph.nodes):
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
        if node.op != "call_function" or node.target not in _VIEWS or node.target is aten.contiguous.default:
            continue
        source = node
        while source.op == "call_function" and source.target in _VIEWS:
            source = args_of(source)[0]
            if _shape(source) == _shape(node) and source.meta["val"].dtype == node.meta["val"].dtype:
                node.replace_all_uses_with(source)
                break


__all__ = ["recognise"]

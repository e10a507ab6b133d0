"""Canonical forms of what mixers compute around their operators, so that heads and channels can be followed.

- Pieces without elements (the rotary part of heads without rotation) are left out.
- `x[..., -S:]` and `x[..., :S]` of S tokens are x.
- `W @ xᵀ`, with a parameter on the left, is `(x Wᵀ)ᵀ`.
- Key heads or groups that a model repeats for its heads are read as they are: a recurrence's head h has h // (H / G).
- Heads folded into tokens, `norm(x.reshape(-1, E))` of x [B, S, H, E], stay a dimension of their own: B · S · H is one
  dynamic size, in which no head can be told from a token.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree  # the stable subset: tree_map

from rewriter.ir import args_of, ops, placeholders
from rewriter.ir.labels import dynamic
from rewriter.ir.op_semantics import argument, aten, dims_of, is_pointwise, kind_of
from rewriter.tracing.functionalize import computed
from rewriter.tracing.interception import Recorded


def simplify(graph: fx.Graph) -> None:
    """Rewrite empty pieces, slices of all tokens, products with a parameter on the left, and repeated groups, in
    place."""
    for node in list(graph.nodes):
        if (new := _without_empty(node)) is not None:
            pass
        elif node.target is aten.slice.Tensor and _keeps_all(node):
            new = args_of(node)[0]
        elif node.target is aten.matmul.default and _multiplies_transposed(node):
            weight, transposed = args_of(node)
            with graph.inserting_before(node):
                product = computed(graph, aten.linear.default, args_of(transposed)[0], weight)
                new = computed(graph, aten.transpose.int, product, 1, 2)
        if new is not None:
            node.replace_all_uses_with(new)
            graph.erase_node(node)
        elif node.target in _GROUPS:
            _once(node, _GROUPS[node.target])


def _without_empty(node: fx.Node) -> fx.Node | None:
    """The result of a split, concatenation or write into a slice of which all pieces but one have no elements."""
    if node.target is operator.getitem and args_of(node)[0].target is aten.split_with_sizes.default:
        sizes, place = args_of(args_of(node)[0])[1], args_of(node)[1]
        return args_of(args_of(node)[0])[0] if sizes[place] != 0 and sum(s != 0 for s in sizes) == 1 else None
    if node.target is aten.cat.default:
        full = [piece for piece in args_of(node)[0] if not _is_empty(piece)]
        return full[0] if len(full) == 1 and full[0].meta["val"].dtype == node.meta["val"].dtype else None
    if node.target is aten.slice_scatter.default and _is_empty(args_of(node)[1]):
        return args_of(node)[0]
    return None


def _is_empty(node: fx.Node) -> bool:
    return any(not dynamic(size) and size == 0 for size in node.meta["val"].shape)


# places, among the inputs of recurrences, of the two that have a key head or group for several heads
_GROUPS = {ops.delta_rule: (0, 1), ops.state_space: (3, 4)}


def _once(node: fx.Node, places: tuple[int, ...]) -> None:
    """Let a recurrence read key heads or groups [B, S, G, D] before both were repeated for its heads."""
    repeated = [args_of(node)[place] for place in places]
    along = all(n.target is aten.repeat_interleave.self_int and argument(n, "dim") in (2, -2) for n in repeated)
    if along and len({argument(n, "repeats") for n in repeated}) == 1:
        for place, n in zip(places, repeated, strict=True):
            node.update_arg(place, args_of(n)[0])


def _keeps_all(node: fx.Node) -> bool:
    """True if a slice takes the first or the last S of S elements."""
    source, start, end = args_of(node)[0], argument(node, "start"), argument(node, "end")
    size = source.meta["val"].shape[argument(node, "dim")]
    begin, stop = (x.meta["val"] if isinstance(x, fx.Node) else x for x in (start, end))
    to_end = stop is None or str(stop) == str(size) or (isinstance(stop, int) and stop >= 1 << 62)
    from_begin = begin in (None, 0) if not isinstance(begin, torch.SymInt) else str(begin) == f"-{size}"
    return dynamic(size) and to_end and from_begin and argument(node, "step") == 1


def _multiplies_transposed(node: fx.Node) -> bool:
    left, right = args_of(node)
    if left.op != "get_attr" or right.target is not aten.transpose.int or left.meta["val"].dim() != 2:
        return False
    return right.meta["val"].dim() == 3 and {d % 3 for d in args_of(right)[1:3]} == {1, 2}


# --- heads among tokens ----------------------------------------------------------------------------------------------


def unfold_heads(graph: fx.Graph) -> dict[str, int]:
    """Give heads that a graph folds into tokens their own dimension again, in place.

    Returns, per module that is called on such values, the number of heads; it is to be traced as `unfolded` calls it.
    """
    region = {n: k for n in graph.nodes if (k := _folded(n)) is not None}
    if not all(_can_unfold(node, region) for node in region):
        return {}
    called = {}
    for node, heads in region.items():
        value, source = node.meta["val"], args_of(node)[0]
        if kind_of(node) == "view":
            batch, length = source.meta["val"].shape[:2]
            node.args = (source, [_size(node, batch), _size(node, length), heads, value.shape[1]])
        else:
            batch, length = next(n for n in node.all_input_nodes if n in region).meta["val"].shape[:2]
        with value.fake_mode:
            node.meta["val"] = value.new_empty((batch, length, heads, value.shape[1]))
        if node.op == "call_module":
            called[str(node.target)] = heads
    return called


def unfolded(call: Recorded, heads: int, batch: int, length: int) -> Recorded:
    """A call of a module on [batch · length · heads, E], as one on [batch, length, heads, E]."""

    def apart(x: Any) -> Any:
        folded = isinstance(x, torch.Tensor) and x.dim() == 2 and x.shape[0] == batch * length * heads
        return x.reshape(batch, length, heads, x.shape[1]) if folded else x

    return Recorded(*pytree.tree_map(apart, (call.args, call.kwargs, call.output)))


def _folded(node: fx.Node) -> int | None:
    """k of a value [B · S · k, E]."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() != 2 or not dynamic(value.shape[0]):
        return None
    size: Any = value.shape[0]
    factor, symbols = size.node.expr.as_coeff_Mul()
    return int(factor) if factor > 1 and len(symbols.free_symbols) == 2 else None


def _can_unfold(node: fx.Node, region: Mapping[fx.Node, int]) -> bool:
    """True if a node of the region begins it by a view, or computes along the last dimension or element by element."""
    if kind_of(node) == "view":
        shape = args_of(node)[0].meta["val"].shape
        return args_of(node)[0] not in region and len(shape) >= 3 and [*map(dynamic, shape)][:3] == [True, True, False]
    others = [n for n in node.all_input_nodes if n not in region and isinstance(n.meta.get("val"), torch.Tensor)]
    if any(n.meta["val"].dim() > 1 for n in others):
        return False
    along = kind_of(node) == "reduction" and argument(node, "keepdim") and dims_of(node) == [-1]
    return node.op == "call_module" or is_pointwise(node) or bool(along)


def _size(before: fx.Node, size: Any) -> fx.Node:
    """The node of a dynamic size: one that is there already, or one of the first input that has it."""
    graph = before.graph
    known = (n for n in graph.nodes if n.target is aten.sym_size.int and str(n.meta["val"]) == str(size) and n < before)
    if (node := next(known, None)) is not None:
        return node
    values = ((n, n.meta["val"].shape) for n in graph.nodes if isinstance(n.meta.get("val"), torch.Tensor))
    source, dim = next((n, d) for n, shape in values for d, s in enumerate(shape) if str(s) == str(size))
    with graph.inserting_after(source if source.op != "placeholder" else placeholders(graph)[-1]):
        node = graph.call_function(aten.sym_size.int, (source, dim))
    node.meta["val"] = size
    return node

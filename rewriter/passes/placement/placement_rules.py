"""Rules for nodes whose values are split over ranks: one rule per kind of node.

A rule reads which values are sharded, partial or local (`PlacementState`), edits the graph in place, and raises
Unsplittable with the reason. A replicated value that enters rank-local computation passes `copy_to_group`,
whose gradient is an all-reduce.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from rewriter.ir import Body, Leaf, args_of, ops, placeholders, put_after
from rewriter.ir.labels import (
    Unsplittable,
    is_reduction_in_place,
    is_tensor,
    reduced_shape,
    tensor_inputs,
    value_of,
    varying_dim,
)
from rewriter.ir.marks import mark
from rewriter.ir.op_semantics import (
    argument,
    aten,
    factors_of,
    function_of,
    is_movement,
    is_pointwise,
    is_sum,
    kind_of,
    operator_of,
    slice_bounds,
)
from rewriter.passes.placement.mixers import place_convolution, place_mixer
from rewriter.passes.placement.placement_state import PlacementState, Split, alike_inputs, name_of, reads_values
from rewriter.passes.placement.projections import Product, Shard, column_parallel, held, is_projection, row_parallel
from rewriter.passes.placement.units import AXIS, Ranges, Units, equal_runs


def is_linear(node: fx.Node) -> bool:
    """True if a sum over ranks may be taken after a node as well as before it: linear in its first tensor."""
    row = operator_of(node)
    return is_sum(node) or (row is not None and (row.kind == "cast" or row.function in ("mul", "div", "neg")))


# --- modules ---------------------------------------------------------------------------------------------------------


def place_call(state: PlacementState, node: fx.Node, exits: Collection[fx.Node]) -> None:
    """A module: a projection is split by its outputs, or by its inputs where it makes the body's output."""
    path = str(node.target)
    module = state.modules[path]
    source = args_of(node)[0]
    if is_projection(module):
        _place_projection(state, node, exits)
    elif isinstance(module, Leaf) and module.kind == "LayerNorm" and _beside_heads(state, node):
        state.modules[path] = replace(module, options={**module.options, "entered": True})
    elif isinstance(module, Body) and not reads_values(module):
        if source in state.sharded:
            _lend_dtype(state, node, module)
    elif node in state.sharded or source in state.sharded:
        if not isinstance(module, Body):
            kind = getattr(module, "kind", module)
            if kind == "OffloadedEmbedding":
                raise Unsplittable(f"{path} looks up in the host's memory, from ids that every rank has")
            raise Unsplittable(f"{path} ({kind}) normalises over split channels")
        inner = split_inner(state, module, node)
        state.replace(path, (inner.result().body, inner.shards))
    elif any(n in state.partial for n in node.all_input_nodes):
        raise Unsplittable(f"{path} reads a sum that is not complete")


def _place_projection(state: PlacementState, node: fx.Node, exits: Collection[fx.Node]) -> None:
    path = str(node.target)
    module, source = state.modules[path], args_of(node)[0]
    assert isinstance(module, Leaf)
    if node in exits and source in state.sharded:
        state.replace(path, row_parallel(module, state.sharded[source][1]))
        state.partial.add(node)
    elif node in state.sharded:
        if source in state.sharded:
            _take_own_of(state, node, _sum_inside(state, node, module))
            return
        state.replace(path, column_parallel(module, state.sharded[node][1], state.shared(node)))
        state.copy_to_group(node, source)
    elif source in state.sharded:
        _sum_inside(state, node, module)
    elif source in state.partial:
        raise Unsplittable(f"{path} reads a sum that is not complete")


def _sum_inside(state: PlacementState, node: fx.Node, module: Leaf) -> fx.Node:
    """A projection of split values that is needed whole inside: split by inputs, with an all-reduce behind it."""
    source = args_of(node)[0]
    dim, ranges = state.sharded[source]
    if dim != value_of(source).dim() - 1:
        raise Unsplittable(f"{node.target} reads values that are split along another dimension")
    if state.shared(source):  # of what several ranks hold, each takes a part
        size = int(value_of(source).shape[dim])
        own = equal_runs(size, state.ranks)
        parts = tuple(_inside(part, held) for part, held in zip(own, ranges, strict=True))
        if size % state.ranks or None in parts:
            raise Unsplittable(f"{node.target} reads heads that several ranks hold, in another order than theirs")
        with state.graph.inserting_before(node):
            part = state.graph.call_function(ops.own_ranges, (source, AXIS, dim, parts))
        part.meta["val"] = value_of(source).narrow(dim, 0, held(own))
        state.local.add(part)
        node.replace_input_with(source, part)
        ranges = own
    state.replace(str(node.target), row_parallel(module, ranges))
    total = put_after(node, ops.all_reduce, AXIS)
    total.meta["val"] = value_of(node)
    return total


def _inside(part: Ranges, held: Ranges) -> Ranges | None:
    """The place of one run among what a rank holds of a dimension; None where it does not hold all of it."""
    (begin, end), before = part[0], 0
    for first, last in held:
        if first <= begin and end <= last:
            return ((before + begin - first, before + end - first),)
        before += last - first
    return None


def _take_own_of(state: PlacementState, node: fx.Node, total: fx.Node) -> None:
    """Of the whole result of a projection inside, a rank goes on with the part that is of its heads."""
    dim, ranges = split = state.sharded.pop(node)
    if dim != value_of(node).dim() - 1:
        raise Unsplittable(f"{node.target} makes values that are split along another dimension")
    state.local.discard(node)
    own = put_after(total, ops.own_ranges, AXIS, dim, ranges)
    own.meta["val"] = value_of(node).narrow(dim, 0, held(ranges))
    state.labels.of[own] = state.labels.of[node]
    state.sharded[own] = split
    state.local.add(own)
    state.copy_to_group(own, total)


def _beside_heads(state: PlacementState, node: fx.Node) -> bool:
    """True if a module works along the last dimension of values that are split along another."""
    labels = state.labels.of.get(node)
    return labels is not None and varying_dim(labels) not in (None, labels.dim() - 1)


def _lend_dtype(state: PlacementState, node: fx.Node, module: Body) -> None:
    """A rotary embedding reads a value's dtype alone: give it the body's own input instead of a split value."""
    source, given = args_of(node)[0], placeholders(state.graph)[0]
    asked = placeholders(module.graph)[0].users
    if value_of(given).dtype != value_of(source).dtype or any(u.target is aten.sym_size.int for u in asked):
        raise Unsplittable(f"{node.target} asks for the sizes of split heads or channels")
    node.args = (given, *args_of(node)[1:])


def split_inner(outer: PlacementState, body: Body, call: fx.Node) -> PlacementState:
    """A small body (a norm) that is called on split values; its output is split as they are.

    A mean over the split dimension becomes the mean of the ranks' means, by one small all-reduce. Which rank holds a
    value counts here, not its head: the groups of a group norm may hold several heads.
    """
    labels = outer.labels.of[args_of(call)[0]]
    units = outer.units
    if not units.shared(labels.flatten()):
        labels, units = units.owners(labels), Units(outer.ranks)
        units.channels(outer.ranks, "ranks")
    state = PlacementState(body, units)
    alike = alike_inputs(call)
    for inner, given in zip(placeholders(state.graph), args_of(call), strict=True):
        if given in alike:
            state.labels.set(inner, labels)
    state.labels.propagate()
    state.find_sharded()
    for node in list(state.graph.nodes):
        if node.op == "get_attr" and node in state.sharded:
            state.shards[str(node.target)] = state.shard(node)
        elif node.op == "call_module":
            raise Unsplittable(f"{body.class_name} calls {node.target} on split channels")
        elif node.op == "call_function":
            place_function(state, node)
    if args_of(state.graph.output_node())[0] not in state.sharded:
        raise Unsplittable(f"{body.class_name} mixes split heads or channels")
    return state


# --- operators -------------------------------------------------------------------------------------------------------


# expansions that name no sizes, so that they expand a whole value to all of it
_UNSIZED = (aten.repeat_interleave.self_int, aten.repeat.default)


def place_function(state: PlacementState, node: fx.Node) -> None:
    """An operator that is no product with a parameter."""
    inputs = tensor_inputs(node)
    if node.target is aten.sym_size.int and isinstance(value_of(node), torch.SymInt):
        return  # of tokens, which are all there
    if node.target in (*ops.RECURRENT, ops.remember):
        place_mixer(state, node)
    elif node.target is ops.experts:
        _place_experts(state, node)
    elif any(n in state.partial for n in inputs):
        _place_linear(state, node, inputs)
    elif node.target is ops.attention:
        _place_attention(state, node, inputs)
    elif kind_of(node) in ("stack", "join") and node in state.sharded and not state.sharded.keys() & set(inputs):
        _take_own(state, node)
    elif is_movement(node):
        if node in state.sharded:  # a value of every rank beside a rank's own ones, or repeated for its heads
            if node.target in _UNSIZED and not state.sharded.keys() & set(inputs):
                raise Unsplittable(f"{name_of(node)} repeats heads or channels that each rank has all of")
            _require_even_pieces(state, node, inputs)
            state.copy_to_group(node, *(n for n in inputs if n not in state.sharded and is_tensor(n)))
        localize(node, state.sharded)
    elif kind_of(node) == "convolution":
        place_convolution(state, node)
    elif is_sum(node):
        reduce_over_ranks(node, state.sharded, state.ranks, state.copies(node))
    elif any(n in state.sharded or n in state.local for n in inputs):
        if kind_of(node) == "product":
            _place_batch(state, node, inputs)
            return
        along = kind_of(node) == "normalization" or is_reduction_in_place(node)
        beside = along and node in state.sharded  # along dimensions that are whole
        if not is_pointwise(node) and not beside and node not in state.local:
            raise Unsplittable(f"{name_of(node)} is computed over split heads or channels")
        state.copy_to_group(node, *(n for n in inputs if n not in state.sharded))


def _place_batch(state: PlacementState, node: fx.Node, inputs: Collection[fx.Node]) -> None:
    """A batch of products: each rank has its own ones, or rows or columns of each, or a part of what they sum over."""

    def split(n: fx.Node) -> tuple[int, Any]:
        """Dimension, from the end, and ranges; 0 for a value that is whole."""
        dim, ranges = state.sharded.get(n, (value_of(n).dim(), None))
        return dim - value_of(n).dim(), ranges

    factors = factors_of(node)
    own, left, right = map(split, (node, *factors))
    if own[0] < -2 and all(split(n) == own for n in inputs):
        return
    outer = (own[0], left, right[0]) == (-2, own, 0) or (own[0], left[0], right) == (-1, 0, own)
    inner = (own[0], left[0], right[0]) == (0, -1, -2) and left[1] == right[1] and not state.shared(factors[0])
    if node.target is aten.linear.default or set(inputs) != set(factors) or not (outer or inner):
        raise Unsplittable(f"{name_of(node)} is computed over split heads or channels")
    if inner:
        put_after(node, ops.all_reduce, AXIS).meta["val"] = value_of(node)
    else:
        state.copy_to_group(node, *(n for n in factors if n not in state.sharded))


def _place_attention(state: PlacementState, node: fx.Node, inputs: Collection[fx.Node]) -> None:
    if node not in state.sharded:
        return
    state.copy_to_group(node, *(n for n in inputs if n not in state.sharded and value_of(n).is_floating_point()))
    _split_bias(state, node)
    mark(node, local_q_heads=held(state.sharded[node][1]))
    if (keys := args_of(node)[1]) in state.sharded:
        mark(node, local_kv_heads=held(state.sharded[keys][1]))


def _split_bias(state: PlacementState, node: fx.Node) -> None:
    """Each rank adds the part of a position bias that is for its own heads."""
    for name, behind in (("bias", 2), ("slopes", 0)):  # dimensions behind that of the heads
        bias = node.kwargs.get(name)
        if not isinstance(bias, fx.Node) or bias in state.sharded or value_of(bias).dim() <= behind:
            continue
        dim = value_of(bias).dim() - 1 - behind
        if value_of(bias).shape[dim] != reduced_shape(value_of(node))[1]:
            continue  # one for all heads
        with state.graph.inserting_before(node):
            own = state.graph.call_function(ops.own_shard, (bias, AXIS, dim))
        own.meta["val"] = value_of(bias).narrow(dim, 0, value_of(bias).shape[dim] // state.ranks)
        node.kwargs = {**node.kwargs, name: own}


def _require_even_pieces(state: PlacementState, node: fx.Node, inputs: Collection[fx.Node]) -> None:
    """Raises Unsplittable for a value joined of split ones and of one that is whole, of which ranks need parts."""
    whole = [n for n in inputs if n not in state.sharded] if kind_of(node) == "join" else []
    if any((state.labels.of_source(node, n, state.labels.of[node]) >= 0).any() for n in whole):
        raise Unsplittable(f"{name_of(node)} joins split heads or channels and some that do not come out even")


def _take_own(state: PlacementState, node: fx.Node) -> None:
    """Stacks or joins of whole values of which a rank needs its own part: parameters of single heads, and pieces that
    do not come out even one by one."""
    dim, ranges = split = state.sharded.pop(node)
    state.local.discard(node)
    whole, size = node, int(value_of(node).shape[dim])
    if size < state.ranks and state.ranks % size == 0:  # key/value heads that several ranks hold
        whole = put_after(node, aten.repeat_interleave.self_int, state.ranks // size, dim)
        whole.meta["val"] = value_of(node).repeat_interleave(state.ranks // size, dim)
    held_alike = tuple(((rank * size // state.ranks, rank * size // state.ranks + 1),) for rank in range(state.ranks))
    if ranges != (equal_runs(size, state.ranks) if whole is node else held_alike):
        raise Unsplittable(
            f"{size} heads or channels that each rank has all of are not in equal runs on {state.ranks} ranks"
        )
    own = put_after(whole, ops.own_shard, AXIS, dim)
    own.meta["val"] = value_of(whole).narrow(dim, 0, max(1, size // state.ranks))
    state.sharded[own] = split
    state.local.add(own)
    state.copy_to_group(own, whole)


def _place_linear(state: PlacementState, node: fx.Node, inputs: Collection[fx.Node]) -> None:
    """An operator that reads partial sums: its result is one, too, where it is linear in them."""
    summands = [n for n in inputs if n in state.partial]
    function = function_of(node)
    if function == "add":
        for complete in (n for n in inputs if n not in summands):
            _share(state, node, complete)
    elif is_linear(node) and len(summands) == 1 and (function != "div" or args_of(node)[0] in summands):
        state.copy_to_group(node, *(n for n in inputs if n not in summands))
    elif not is_movement(node):
        raise Unsplittable(f"{name_of(node)} is not linear and reads a sum that is not complete")
    state.partial.add(node)


def place_product(state: PlacementState, node: fx.Node, product: Product, exits: Collection[fx.Node]) -> None:
    """A product with a parameter of the body itself, split as a projection is: by output or by input."""
    name, source, sharded = str(product.weight.target), product.source, state.sharded
    if name not in state.body.parameters or source in state.partial:
        raise Unsplittable(f"{name_of(node)} with {name} reads a sum that is not complete, or a constant")
    if node in sharded and sharded[node] == sharded.get(source) and sharded[node][0] < value_of(node).dim() - 1:
        state.copy_to_group(node, product.weight)  # one matrix for every head
        return
    for value in (node, source):
        if value in sharded and sharded[value][0] != value_of(value).dim() - 1:
            raise Unsplittable(f"{name_of(node)} with {name} is computed over split heads or channels")
    if node in exits and source in sharded:
        state.shards[name] = Shard(product.entry, sharded[source][1])
        if product.bias is not None:
            _share(state, node, product.bias)
        state.partial.add(node)
    elif node in sharded and source not in sharded:
        ranges, shared = sharded[node][1], state.shared(node)
        state.shards[name] = Shard(product.exit, ranges, shared)
        if product.bias is not None:
            state.shards[str(product.bias.target)] = Shard(0, ranges, shared)
        state.copy_to_group(node, source)
    else:
        raise Unsplittable(f"{name_of(node)} with {name} is both an entry and an exit, or its output is not summed")


def _share(state: PlacementState, node: fx.Node, complete: fx.Node) -> None:
    """Every rank adds an equal part of a value that all of them hold (a bias, say) to its part of a sum."""
    if complete in state.local or not is_tensor(complete):
        raise Unsplittable(f"{name_of(node)} adds {complete.name} to a sum over ranks, of which they hold parts")
    state.copy_to_group(node, complete)
    full = state.copied.get(complete, complete)
    with state.graph.inserting_before(node):
        share = state.graph.call_function(aten.mul.Tensor, (full, 1.0 / state.ranks))
    share.meta["val"] = value_of(complete)
    node.replace_input_with(full, share)


def _place_experts(state: PlacementState, node: fx.Node) -> None:
    """Every expert is split by channels. Each rank adds its part of the second projection's bias."""
    x, _, weight, up, down, up_bias, down_bias = (*args_of(node), None, None)[:7]
    transposed, layout = node.kwargs.get("transposed", False), node.kwargs.get("layout", "concatenated")
    size = int(value_of(down).shape[1 if transposed else 2])
    if size % state.ranks:
        raise Unsplittable(f"{size} expert channels do not divide by {state.ranks}")
    runs = equal_runs(size, state.ranks)
    ranges: dict[Any, tuple[Ranges, ...]] = {
        "concatenated": tuple(((a, b), (size + a, size + b)) for ((a, b),) in runs),
        "interleaved": equal_runs(2 * size, state.ranks),
        "ungated": runs,
    }
    state.shards[str(up.target)] = Shard(2 if transposed else 1, ranges[layout])
    state.shards[str(down.target)] = Shard(1 if transposed else 2, ranges["ungated"])
    if up_bias is not None:
        state.shards[str(up_bias.target)] = Shard(1, ranges[layout])
    state.copy_to_group(node, x, weight)
    if down_bias is not None:
        _share(state, node, down_bias)
    state.partial.add(node)


def localize(node: fx.Node, sharded: Mapping[fx.Node, Split]) -> None:
    """Replace full sizes among the arguments of a movement operator by local ones."""
    row, source = operator_of(node), args_of(node)[0]
    if row is not None and row.sizes is not None and node in sharded:
        _localize_sizes(node, row.sizes, sharded[node])
    elif node.target is aten.slice.Tensor and _along_split(node, sharded):
        split = sharded[source]
        bounds = _local_bounds(node, value_of(source).shape[split[0]], split[1])
        node.args = (source, argument(node, "dim"), *bounds, *node.args[4:])
    elif node.target in (aten.split.Tensor, aten.split_with_sizes.default) and _along_split(node, sharded):
        _localize_split(node, sharded)
    elif node.target in (aten.chunk.default, aten.select.int) and _along_split(node, sharded):
        pieces = [node] if node.target is aten.select.int else node.users
        if any(piece not in sharded for piece in pieces):
            raise Unsplittable(f"{name_of(node)} takes single heads or channels, which are not on every rank")


def _along_split(node: fx.Node, sharded: Mapping[fx.Node, Split]) -> bool:
    """True if an operator takes pieces along the dimension of its argument that is split."""
    source = args_of(node)[0]
    return source in sharded and argument(node, "dim") % value_of(source).dim() == sharded[source][0]


def _localize_sizes(node: fx.Node, place: int, split: Split) -> None:
    sizes = list(args_of(node)[place])
    first = argument(node, "dim") % value_of(args_of(node)[0]).dim() if place > 1 else 0  # of the sizes that are given
    dim = split[0] - first
    if 0 <= dim < len(sizes) and isinstance(sizes[dim], int) and sizes[dim] != -1:
        sizes[dim] = held(split[1])
    node.update_arg(place, sizes)


def _local_bounds(node: fx.Node, size: int, ranges: tuple[Ranges, ...]) -> list[int]:
    places = slice_bounds(node, size)
    if places is None:
        raise Unsplittable("a split dimension is sliced at a computed place")
    bounds = {tuple(sum(max(0, min(b, x) - a) for a, b in r) for x in places) for r in ranges}
    if len(bounds) != 1:
        raise Unsplittable("ranks would slice a split dimension differently")
    return list(bounds.pop())


def _localize_split(node: fx.Node, sharded: Mapping[fx.Node, Split]) -> None:
    """Pieces of local sizes: each holds what the ranks hold of it."""
    dim = sharded[args_of(node)[0]][0]
    sizes = {args_of(u)[1]: held(sharded[u][1]) if u in sharded else int(value_of(u).shape[dim]) for u in node.users}
    if len(sizes) != len(value_of(node)):
        raise Unsplittable(f"{name_of(node)}: not every piece is used")
    if sum(sizes.values()) != held(sharded[args_of(node)[0]][1]):
        raise Unsplittable(f"{name_of(node)} takes single heads or channels, which are not on every rank")
    if node.target is aten.split.Tensor and len(set(sizes.values())) == 1:
        node.update_arg(1, next(iter(sizes.values())))
    else:
        node.update_arg(1, [sizes[i] for i in range(len(sizes))])
        node.target = aten.split_with_sizes.default


def reduce_over_ranks(node: fx.Node, sharded: Mapping[fx.Node, Split], ranks: int, copies: int | None) -> None:
    """A sum or mean over the split dimension, completed by an all-reduce; the result is replicated.

    `copies` ranks hold each element (several may hold a key/value head), so that a sum counts it that often.
    """
    source = args_of(node)[0]
    if source not in sharded or sharded[source][0] not in {d % value_of(source).dim() for d in args_of(node)[1]}:
        return
    if copies is None:
        raise Unsplittable(f"{name_of(node)} reduces over heads of which ranks hold unequal numbers of copies")
    total = put_after(node, ops.all_reduce, AXIS)
    total.meta["val"] = value_of(node)
    factor = 1.0 / (ranks if function_of(node) == "mean" else copies)
    if factor != 1.0:
        put_after(total, aten.mul.Tensor, factor).meta["val"] = value_of(node)

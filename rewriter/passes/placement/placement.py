"""Splits one body over ranks: entry projections by output (heads whole), exit projections by input.

The result is a body of local sizes whose output is Partial: the sum over ranks is the original output. Values are
Replicated, Shard(dim) or Partial. The walk is here: it finds the exits, labels the units of attention and of the exits,
and applies a rule (`placement_rules`) to each node.
"""

from __future__ import annotations

import torch
from torch import fx

from rewriter.ir import Body, Leaf, args_of, called_module, ops, put_after
from rewriter.ir.labels import Unsplittable, common, is_tensor, reduced_shape, tensor_inputs, value_of
from rewriter.ir.op_semantics import function_of, is_movement, is_pointwise
from rewriter.passes.placement.mixers import label_mixers
from rewriter.passes.placement.placement_rules import is_linear, place_call, place_function, place_product
from rewriter.passes.placement.placement_state import PlacementState, SplitBody, alike_inputs, name_of, reads_values
from rewriter.passes.placement.projections import held, is_projection, product_of
from rewriter.passes.placement.units import AXIS, Units


def split_body(body: Body, ranks: int) -> SplitBody:
    """`body` for one of `ranks` ranks: its first output is Partial, and others are Replicated.

    Raises Unsplittable with the reason.
    """
    state, exits = labelled(body, Units(ranks))
    state.find_sharded()
    for node in state.graph.nodes:
        # the one key/value head of a fused projection is no shard, but every rank computes it from its own copy
        through = is_movement(node) or is_pointwise(node)
        if node in state.sharded or (through and any(n in state.local for n in tensor_inputs(node))):
            state.local.add(node)
    for node in list(state.graph.nodes):
        _place(state, node, set(exits))
    summed, *others = state.results
    if summed not in state.partial:
        raise Unsplittable("its output is not a sum over heads or channels")
    if any(n in state.partial or (n in state.local and n not in state.sharded) for n in others):
        raise Unsplittable("it returns several tensors, and ranks would hold different values of one beside the first")
    return state.result()


def labelled(body: Body, units: Units) -> tuple[PlacementState, list[fx.Node]]:
    """(`body` with its values labelled by the unit that each element belongs to, its exits).

    Raises Unsplittable with the reason.
    """
    state = PlacementState(body, units)
    exits = _exits(state)
    _label_attention(state)
    label_mixers(state)
    state.labels.propagate()
    _label_modules(state)  # a norm may stand between the heads and an exit, which would get units of its own
    for node in exits:
        source = args_of(node)[0]
        if node.target is not ops.experts and source not in state.labels.of:
            shape = reduced_shape(value_of(source))
            first = state.units.channels(shape[-1], "channels")
            state.labels.set(source, torch.arange(first, first + shape[-1]).expand(shape))
            state.labels.propagate()
    _label_modules(state)
    return state, exits


def _place(state: PlacementState, node: fx.Node, exits: set[fx.Node]) -> None:
    sharded = state.sharded
    if node.op == "placeholder" and node in sharded and not _is_stored(node):
        raise Unsplittable(f"its input {node.name} would be split")
    if node.op == "get_attr" and node in sharded:
        if str(node.target) in state.body.buffers:
            _take_own_ranges(state, node)
            return
        state.shards[str(node.target)] = state.shard(node)
    elif node.op == "call_module":
        place_call(state, node, exits)
    elif (product := product_of(node)) is not None and (
        node in sharded or product.source in sharded or product.source in state.partial
    ):
        place_product(state, node, product, exits)
    elif node.op == "call_function":
        place_function(state, node)


def _is_stored(node: fx.Node) -> bool:
    """True for keys or values that an earlier layer stored: their heads are where that layer's are."""
    return any(user.target is ops.attention and user.kwargs.get("stored") for user in node.users)


def _take_own_ranges(state: PlacementState, node: fx.Node) -> None:
    """A constant along split channels, of which every rank takes its part."""
    dim, ranges = state.sharded.pop(node)
    users, value = list(node.users), value_of(node)
    own = put_after(node, ops.own_ranges, AXIS, dim, ranges)
    own.meta["val"] = value.narrow(dim, 0, held(ranges))
    state.local.discard(node)
    state.sharded[own] = (dim, ranges)
    state.local.add(own)
    assert all(own in user.all_input_nodes for user in users)


# --- where the output is made ----------------------------------------------------------------------------------------


def _exits(state: PlacementState) -> list[fx.Node]:
    """The projections (or experts) whose outputs are summed up to the body's output."""
    exits: list[fx.Node] = []
    todo = state.results[:1]
    while todo:
        node = todo.pop()
        if _is_projection(state, node) or _is_product(state, node):
            exits.append(node)
        elif function_of(node) == "add":
            todo += node.all_input_nodes
        elif is_movement(node) or is_linear(node):
            todo += [n for n in tensor_inputs(node) if _reaches_projection(state, n)]
        elif node.op == "placeholder":
            raise Unsplittable("its output adds its own input")
        else:
            raise Unsplittable(f"its output is made by {name_of(node)}, not by a projection")
    if not exits:
        raise Unsplittable("no projection makes its output")
    return exits


def _reaches_projection(state: PlacementState, node: fx.Node) -> bool:
    """True if linear operators alone lead from a projection to `node` (a gate in front of a sum is none)."""
    if node.op == "call_module":  # a projection to one number per token scales a sum; it is not one of the summands
        return _is_projection(state, node) and reduced_shape(value_of(node))[-1] != 1
    if _is_product(state, node):
        return True
    through = is_movement(node) or is_linear(node) or function_of(node) == "add"
    return through and any(_reaches_projection(state, n) for n in tensor_inputs(node))


def _is_projection(state: PlacementState, node: fx.Node) -> bool:
    return is_projection(called_module(node, state.body.modules))


def _is_product(state: PlacementState, node: fx.Node) -> bool:
    """True if a node projects by parameters of the body itself, and does not only scale."""
    product = product_of(node)
    return node.target is ops.experts or (
        product is not None
        and str(product.weight.target) in state.body.parameters
        and value_of(product.weight).shape[product.exit] != 1
    )


# --- labels ----------------------------------------------------------------------------------------------------------


def _label_attention(state: PlacementState) -> None:
    for node in state.graph.nodes:
        if node.target is not ops.attention:
            continue
        q, k, v = args_of(node)[:3]
        heads, kv_heads = reduced_shape(value_of(q))[1], reduced_shape(value_of(k))[1]
        groups = _groups_of_heads(state, node, heads)
        if groups == heads and kv_heads != heads and kv_heads % state.ranks == 0 and not state.units.by_head:
            groups = kv_heads  # query heads are where their key/value head is: both may meet outside of attention
        first = state.units.channels(groups, "query heads")
        by_head = torch.arange(first, first + groups).repeat_interleave(heads // groups)
        _set_heads(state, q, by_head)
        _set_heads(state, node, by_head)
        if isinstance(sinks := node.kwargs.get("sinks"), fx.Node):
            state.labels.set(sinks, by_head)
        if isinstance(by_distance := node.kwargs.get("by_distance"), fx.Node):
            _set_heads(state, by_distance, by_head)
        # one key/value head per query head is the same unit: fused projections interleave them
        first_kv = (
            first if kv_heads == groups and not state.units.by_head else state.units.key_value_heads(groups, kv_heads)
        )
        if first_kv is not None:
            by_kv_head = torch.arange(first_kv, first_kv + kv_heads)
            for operand in (k, v):
                _set_heads(state, operand, by_kv_head)
            if isinstance(key_bias := node.kwargs.get("key_bias"), fx.Node):
                state.labels.set(key_bias, by_kv_head[None, :, None])


def _groups_of_heads(state: PlacementState, attention: fx.Node, heads: int) -> int:
    """The number of units that query heads are in: groups of them, where a module projects each group by itself."""
    values = {attention}
    for node in state.graph.nodes:
        if not values & set(node.all_input_nodes):
            continue
        if node.op == "call_module" and _projects_groups(node):
            groups = int(value_of(node).shape[-2])
            return groups if heads % groups == 0 else heads
        if is_movement(node) or is_pointwise(node):
            values.add(node)
    return heads


def _projects_groups(node: fx.Node) -> bool:
    """True for a call of [..., G, I] that gives [..., G, O]."""
    if not is_tensor(node) or not is_tensor(args_of(node)[0]):
        return False
    given, made = (reduced_shape(value_of(n)) for n in (args_of(node)[0], node))
    return len(made) == 4 and given[:-1] == made[:-1] and given[-1] != made[-1]


def _set_heads(state: PlacementState, node: fx.Node, heads: torch.Tensor) -> None:
    state.labels.set(node, heads.reshape(1, -1, 1, 1).expand(reduced_shape(value_of(node))))


def _label_modules(state: PlacementState) -> None:
    """Labels agree on both sides of a call of a small body (a norm), until nothing changes."""
    known = -1
    while known != len(state.labels.of):
        known = len(state.labels.of)
        for node in state.graph.nodes:
            module = called_module(node, state.modules)
            norm = isinstance(module, Leaf) and module.kind == "LayerNorm"
            if not norm and not (isinstance(module, Body) and reads_values(module)):
                continue
            before, alike = len(state.labels.of), (node, *alike_inputs(node))
            if (labels := next((state.labels.of[n] for n in alike if n in state.labels.of), None)) is not None:
                for each in alike:
                    shape = reduced_shape(value_of(each))
                    state.labels.set(each, labels if labels.shape == shape else common(labels, -1).expand(shape))
            if len(state.labels.of) != before:
                state.labels.propagate()

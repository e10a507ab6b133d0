"""Units of one body, by parameter: the head or channel that each element along each dimension belongs to.

They are read from the labels that placement follows through a body, so that what tensor parallelism can split, in any
layout, can be padded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from torch import fx

from rewriter.ir import Body, Leaf, args_of, called_module, ops, placeholders
from rewriter.ir.labels import Unsplittable, is_tensor, reduced_shape, value_of, varying_dims
from rewriter.ir.op_semantics import dims_of, function_of, kind_of
from rewriter.passes.placement.placement import labelled
from rewriter.passes.placement.placement_state import PlacementState, alike_inputs, name_of, reads_values
from rewriter.passes.placement.projections import inputs_layout, is_projection, outputs_layout, product_of
from rewriter.passes.placement.units import Axis, Units

Profile = tuple[int, ...]
"""The unit of each element along a dimension; -1: it belongs to none, or to all."""
Rows = frozenset[tuple[int, ...]]
"""The sets of units over each of which something is computed at once."""

_OVER_ALL = ("reduction", "normalization", "scan", "top")  # computed over a dimension, where a zero more may count


@dataclass
class BodyUnits:
    """Units of a body: `axes` by kind; `parameters` has profiles by name and dimension; `over` the units that an
    operator computes over at once, by its place in the graph, with its name."""

    axes: list[Axis]
    parameters: dict[str, dict[int, Profile]] = field(default_factory=dict)
    over: list[tuple[str, Rows]] = field(default_factory=list)

    def add(self, name: str, dim: int, profile: Profile) -> None:
        """Raises Unsplittable where another use of the parameter has other units there."""
        known = self.parameters.setdefault(name, {}).setdefault(dim, profile)
        if known != profile:
            raise Unsplittable(f"{name} is used with different heads or channels")


def body_units(body: Body) -> BodyUnits:
    """The units of a body: query heads one by one, where their key/value head does not hold them together.

    Raises Unsplittable with the reason.
    """
    try:
        return _found(body, Units(1, by_head=True))
    except Unsplittable:
        return _found(body, Units(1))


def channel_units(names: Mapping[str, int], count: int) -> BodyUnits:
    """Units of an MLP whose projections are the layer's own children: by parameter, the dimension of its channels."""
    found = BodyUnits([Axis(0, count, "channels")])
    for name, dim in names.items():
        found.add(name, dim, tuple(range(count)))
    return found


def _found(body: Body, units: Units) -> BodyUnits:
    state, _ = labelled(body, units)
    found = BodyUnits(units.axes)
    _read(state, "", found)
    return found


def _read(state: PlacementState, prefix: str, found: BodyUnits) -> None:
    for node in state.graph.nodes:
        if node.op == "get_attr" and str(node.target) in state.body.parameters:
            for dim, profile in _profiles(state, node):
                found.add(prefix + str(node.target), dim, profile)
        elif node.op == "call_module":
            _read_call(state, node, prefix, found)
        elif node.target is ops.experts:
            _read_experts(state, node, prefix, found)
        elif (product := product_of(node)) is not None:
            name = prefix + str(product.weight.target)
            for value, dim in ((node, product.exit), (product.source, product.entry)):
                if (along := _last(state, value)) is not None:
                    found.add(name, dim, along)
                    if value is node and product.bias is not None and product.bias.op == "get_attr":
                        found.add(prefix + str(product.bias.target), 0, along)
        elif node.op == "call_function" and kind_of(node) in _OVER_ALL and function_of(node) not in ("sum", "norm"):
            _note_rows(state, node, found)


def _profiles(state: PlacementState, node: fx.Node) -> Iterator[tuple[int, Profile]]:
    """The dimensions along which a value's units differ. Raises Unsplittable where two are needed to tell them."""
    labels = state.labels.of.get(node)
    dims = [] if labels is None else varying_dims(labels)
    if len(dims) > 1:
        raise Unsplittable(f"heads or channels of {node.target} lie along two dimensions at once")
    for dim in dims:
        assert labels is not None
        yield dim, tuple(labels.movedim(dim, 0).reshape(labels.shape[dim], -1)[:, 0].tolist())


def _last(state: PlacementState, node: fx.Node) -> Profile | None:
    """The units along the last dimension of a value; None where they do not differ there."""
    last = value_of(node).dim() - 1
    return next((profile for dim, profile in _profiles(state, node) if dim == last), None)


def _read_call(state: PlacementState, node: fx.Node, prefix: str, found: BodyUnits) -> None:
    path, module, source = str(node.target), called_module(node, state.modules), args_of(node)[0]
    if is_projection(module):
        if (made := _last(state, node)) is not None:
            found.add(f"{prefix}{path}.weight", outputs_layout(module)[1], made)
            if "bias" in module.parameters:
                found.add(f"{prefix}{path}.bias", 0, made)
        if (read := _last(state, source)) is not None:
            found.add(f"{prefix}{path}.weight", inputs_layout(module), read)
    elif isinstance(module, Body) and reads_values(module) and source in state.labels.of:
        _read(_inside(state, node, module), f"{prefix}{path}.", found)
    elif isinstance(module, Leaf) and (profile := _last(state, source)) is not None:
        found.over.append((f"{path} ({module.kind})", frozenset({tuple(sorted(profile))})))


def _inside(outer: PlacementState, call: fx.Node, body: Body) -> PlacementState:
    """A small body (a norm) with the labels of what it is called on."""
    state, alike = PlacementState(body, outer.units), alike_inputs(call)
    for inner, given in zip(placeholders(state.graph), args_of(call), strict=True):
        if given in alike and given in outer.labels.of:
            state.labels.set(inner, outer.labels.of[given])
    state.labels.propagate()
    return state


def _note_rows(state: PlacementState, node: fx.Node, found: BodyUnits) -> None:
    source = args_of(node)[0]
    labels = state.labels.of.get(source) if isinstance(source, fx.Node) and is_tensor(source) else None
    if labels is None:
        return
    if kind_of(node) == "normalization":
        dims = list(range(labels.dim() - len(args_of(node)[1]), labels.dim()))
    else:
        dims = [dim % labels.dim() for dim in dims_of(node)] or list(range(labels.dim()))
    if not set(dims) & set(varying_dims(labels)):
        return
    size = prod(labels.shape[dim] for dim in dims)
    rows = labels.movedim(dims, tuple(range(-len(dims), 0))).reshape(-1, size)
    found.over.append((name_of(node), frozenset(tuple(sorted(row)) for row in rows.tolist())))


def _read_experts(state: PlacementState, node: fx.Node, prefix: str, found: BodyUnits) -> None:
    """Channels of experts, the same in each."""
    up, down, up_bias = (*args_of(node), None)[3:6]
    transposed, layout = node.kwargs.get("transposed", False), node.kwargs.get("layout", "concatenated")
    size = int(reduced_shape(value_of(down))[1 if transposed else 2])
    first = state.units.channels(size, "expert channels")
    channels = tuple(range(first, first + size))
    entering = {
        "concatenated": (*channels, *channels),
        "interleaved": tuple(channel for channel in channels for _ in range(2)),
        "ungated": channels,
    }[str(layout)]
    found.add(prefix + str(up.target), 2 if transposed else 1, entering)
    found.add(prefix + str(down.target), 1 if transposed else 2, channels)
    if up_bias is not None:
        found.add(prefix + str(up_bias.target), 1, entering)


def source_units(old: BodyUnits, new: BodyUnits) -> dict[int, int]:
    """For each unit of a padded body, the one of its source that it is; -1 for padding.

    Query heads of a key/value head stay together: where a head of the padded body serves fewer of them, it is repeated
    for the others. Raises Unsplittable where the padded body has too few.
    """
    if [axis.quantum for axis in old.axes] != [axis.quantum for axis in new.axes]:
        raise Unsplittable("its padded form has other heads and channels")
    result = {-1: -1}
    for before, after in zip(old.axes, new.axes, strict=True):
        if after.count < before.count:
            raise Unsplittable(f"its padded form has {after.count} {after.quantum} for {before.count}")
        if before.queries is None or after.queries is None:
            for place in range(after.count):
                result[after.first + place] = before.first + place if place < before.count else -1
            continue
        served, serves = before.queries.count // before.count, after.queries.count // after.count
        copies = -(-served // serves)
        if copies * before.count > after.count:
            raise Unsplittable(
                f"its padded form has {after.count} {after.quantum}, and {copies} of each of {before.count} are needed"
            )
        for place in range(after.count):
            head, copy = divmod(place, copies)
            result[after.first + place] = before.first + head if head < before.count else -1
            for slot in range(serves):
                query, real = copy * serves + slot, head < before.count
                result[after.queries.first + place * serves + slot] = (
                    before.queries.first + head * served + query if real and query < served else -1
                )
    return result


def places(old: Profile, new: Profile, source: Mapping[int, int]) -> tuple[int, ...]:
    """The place in the source that each element along a dimension comes from; -1 for padding.

    Raises Unsplittable where a unit has other numbers of elements in the two.
    """
    held: dict[int, list[int]] = {}
    for place, unit in enumerate(old):
        held.setdefault(unit, []).append(place)
    seen: Counter[int] = Counter()
    result = []
    for unit in new:
        of = source[unit]
        if of == -1 and unit != -1:
            result.append(-1)
            continue
        if seen[unit] >= len(held.get(of, ())):
            raise Unsplittable("its padded form lays heads or channels out otherwise")
        result.append(held[of][seen[unit]])
        seen[unit] += 1
    if any(count != len(held[source[unit]]) for unit, count in seen.items()):
        raise Unsplittable("its padded form lays heads or channels out otherwise")
    return tuple(result)


def require_alike(old: BodyUnits, new: BodyUnits, source: Mapping[int, int]) -> None:
    """Raise Unsplittable where an operator computes over real units and padding at once, such as the mean of a norm."""
    if [name for name, _ in old.over] != [name for name, _ in new.over]:
        raise Unsplittable("its padded form computes otherwise")
    for (name, before), (_, after) in zip(old.over, new.over, strict=True):
        mapped = {tuple(sorted(source[unit] for unit in row)) for row in after}
        if any(set(row) != {-1} and row not in before for row in mapped):
            raise Unsplittable(
                f"{name} computes over all heads or channels at once, and padding would count among them"
            )

"""Units of a block that may change places: key/value heads with their query heads, MLP channels.

Where each unit stands in each parameter is read from the block split over as many ranks as it has units: what rank i
would hold are the elements of unit i. So what tensor parallelism can split, in any layout, can be reordered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd

from torch import fx

from rewriter.common.errors import RewriterError
from rewriter.ir import Body, Leaf, Program, args_of, called_module, nodes_inside, ops
from rewriter.ir.labels import Unsplittable, reduced_shape, value_of
from rewriter.ir.marks import layer_of, marks
from rewriter.ir.residual import attends
from rewriter.passes.placement.placement import split_body
from rewriter.passes.placement.projections import (
    Shard,
    chains,
    column_parallel,
    held,
    inputs_of,
    outputs_of,
    row_parallel,
)
from rewriter.passes.placement.units import equal_runs


@dataclass(frozen=True)
class PermutableUnits:
    """A block's `count` units and where they are: by parameter (canonical runtime name), per unit, ranges along a dim.

    `path` is the block's module; for an MLP whose projections are the layer's own children, its last one. `heads` says
    that units are key/value heads with their queries. `reason` says in words why the units may not move; None: they
    may.
    """

    path: str
    layer: int
    heads: bool
    count: int
    places: Mapping[str, Shard]
    reason: str | None = None

    def index(self, name: str, order: Sequence[int], size: int) -> tuple[int, ...]:
        """The place in parameter `name` that each of its `size` elements along the dim comes from, in a new order.

        Unit order[i] comes to the place of unit i. What several units share, or none has, stays where it is.
        """
        ranges = self.places[name].ranges
        holders = Counter(place for unit in ranges for start, stop in unit for place in range(start, stop))
        own = [[p for start, stop in unit for p in range(start, stop) if holders[p] == 1] for unit in ranges]
        index = list(range(size))
        for place, unit in enumerate(order):
            for target, source in zip(own[place], own[unit], strict=True):
                index[target] = source
        return tuple(index)


def permutable_units(program: Program) -> list[PermutableUnits]:
    """The blocks of an unsharded program that hold units, in the order of the wiring.

    Raises RewriterError for a sharded program.
    """
    if any(parameter.ranges is not None for parameter in program.parameters.values()):
        raise RewriterError("heads and channels are reordered before they are split: put it before tensor_parallel")
    blocks = [*_bodies(program), *_chains(program)]
    order = {str(n.target): i for i, n in enumerate(program.graph.nodes) if n.op == "call_module"}
    users = Counter(name for block in blocks for name in block.places)
    result = []
    for block in sorted(blocks, key=lambda block: order[block.path]):
        shared = [name for name in block.places if users[name] > 1 or name in program.ties.values()]
        if block.reason is None and shared:
            block = _fixed(block.path, block.layer, block.heads, f"it shares {shared[0]} with another module")
        result.append(block)
    return result


def _fixed(path: str, layer: int, heads: bool, reason: str) -> PermutableUnits:
    return PermutableUnits(path, layer, heads, 0, {}, reason)


def _bodies(program: Program) -> Iterator[PermutableUnits]:
    done: dict[int, tuple[int, Mapping[str, Shard]] | str] = {}
    calls = Counter(str(n.target) for n in program.graph.nodes if n.op == "call_module")
    seen: set[str] = set()
    for node in program.graph.nodes:
        path = str(node.target)
        body = called_module(node, program.modules)
        if not isinstance(body, Body) or marks(node).layer is None or path in seen:
            continue
        seen.add(path)
        if not body.modules and not attends(body):
            continue  # norms and other small modules
        layer, heads = layer_of(node), attends(body)
        if id(body) not in done:
            try:
                done[id(body)] = _units(body)
            except Unsplittable as reason:
                done[id(body)] = str(reason)
        units = done[id(body)]
        if calls[path] > 1:
            units = "it is called more than once"
        if isinstance(units, str):
            yield _fixed(path, layer, heads, units)
            continue
        named = {program.ties.get(name := f"{path}.{inner}", name): shard for inner, shard in units[1].items()}
        yield PermutableUnits(path, layer, heads, units[0], named)


def _units(body: Body) -> tuple[int, Mapping[str, Shard]]:
    """(number of units, where they are) of one body. Raises Unsplittable with the reason in words."""
    attentions = [n for _, n in nodes_inside(body) if n.target is ops.attention]
    if attentions:
        queries, keys = (gcd(*(_heads(n, operand) for n in attentions)) for operand in (0, 1))
        # one key/value head for all queries stays where it is, and every query head may move
        count = queries if keys == 1 else keys
    else:
        whole = split_body(body, 1)
        count = gcd(*(held(shard.ranges) for shard in whole.shards.values()))
    split = split_body(body, count)
    if any(n.target is ops.own_shard for _, n in nodes_inside(split.body)):
        raise Unsplittable("each head adds a position bias of its own, which is no parameter of the block")
    return count, split.shards


def _heads(node: fx.Node, operand: int) -> int:
    return reduced_shape(value_of(args_of(node)[operand]))[1]


def _chains(program: Program) -> Iterator[PermutableUnits]:
    for chain in chains(program.graph, program.modules):
        path, layer = str(chain.exit.target), layer_of(chain.exit)
        leaf = program.modules[path]
        assert isinstance(leaf, Leaf)
        count = inputs_of(leaf)
        entries = {str(node.target): program.modules[str(node.target)] for node in chain.entries}
        leaves = {entry: module for entry, module in entries.items() if isinstance(module, Leaf)}
        if {outputs_of(entry) for entry in leaves.values()} != {count}:
            yield _fixed(path, layer, False, "its projections have different numbers of channels")
            continue
        each = equal_runs(count, count)
        splits = {entry: column_parallel(module, each) for entry, module in leaves.items()}
        splits[path] = row_parallel(leaf, each)
        places = {
            program.ties.get(full := f"{owner}.{name}", full): shard
            for owner, (_, shards) in splits.items()
            for name, shard in shards.items()
        }
        yield PermutableUnits(path, layer, False, count, places)

"""Heads and channels in another order, so that those that fit together come to the same rank.

Positions of each unit in each parameter are read from the block split over as many ranks as it has units: what rank i
would hold are the elements of unit i. So what tensor parallelism can split, in any layout, can be reordered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, ClassVar

from torch import fx

from rewriter.common.errors import RewriterError
from rewriter.ir import Body, Leaf, Parameter, Program, args_of, called_module, nodes_inside, ops
from rewriter.ir.labels import Unsplittable, reduced_shape, value_of
from rewriter.ir.marks import layer_of, marks
from rewriter.ir.ops import SequencePlan
from rewriter.ir.residual import attends
from rewriter.passes.base import Effect, Pass, Request, record, with_paths
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
from rewriter.passes.placement.units import AXIS, equal_runs
from rewriter.weights.expressions import Take

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Permute(Pass):
    """W_in ← Π W_in, W_out ← W_out Πᵀ in attention and MLPs: the same function, other units on each rank.

    Tensor parallelism gives rank r the r-th part of a block's units. Where ranks compute with a residual of their own
    (desync, own-partial), it matters which units those are (SPD, arXiv 2502.20727, section 4.3: head grouping).
    Units are key/value heads with their query heads, query heads where there is one key/value head for all, and MLP
    channels, the same in every expert of a layer.

    `ranks` says by block (the path of its module) which rank each unit goes to, one character of 0-9a-z per unit in
    their order on disk: "0110" gives rank 0 units 0 and 3. Units of a rank keep their order; blocks that are not named
    stay as they are. It is measured above the passes and handed in; `measured_on` says with what.
    `round_robin` assigns the units of every block to that number of ranks in turn instead, from the last to the first:
    an order without a measurement. `applied` says that the checkpoint's weights are in this order already: nothing is
    moved again.

    Comes before tensor_parallel. The names and shapes of the adapted checkpoint's tensors are the source's, its config
    too. Raises RewriterError where no order is given, for a block that does not exist or may not be reordered,
    and where ranks would not get equally many units.
    """

    ranks: Mapping[str, str] | None = None
    measured_on: str | None = None
    round_robin: int | None = None
    applied: bool = False

    name: ClassVar[str] = "permute"
    effect: ClassVar[Effect] = "exact"
    routine: ClassVar[bool] = True
    again: ClassVar[Mapping[str, Any]] = {"applied": True}

    def __post_init__(self) -> None:
        if self.ranks is not None and self.round_robin is not None:
            raise RewriterError("permute: give either ranks or round_robin")
        if self.round_robin is not None and not 1 <= self.round_robin <= len(DIGITS):
            raise RewriterError(f"permute: round_robin={self.round_robin}; expected 1 to {len(DIGITS)} ranks")
        for path, given in (self.ranks or {}).items():
            counts = Counter(given)
            if set(counts) != set(DIGITS[: len(counts)]) or len(set(counts.values())) != 1:
                raise RewriterError(
                    f"permute: ranks of {path}: {given[:40]!r}; expected one character of 0-9a-z per unit, each rank "
                    "from 0 on equally often."
                )

    @property
    def request(self) -> Request | None:
        if self.ranks is not None or self.round_robin is not None:
            return None
        return Request(
            "affinity",
            "ranks",
            "the order of heads and channels is found by a measurement",
            "Give permute.ranks (measured on a larger machine), or leave the pass out",
        )

    def supposed(self, standard: Program) -> tuple[Mapping[str, Any], str]:
        reason = "which heads and channels fit together is measured on the weights; they are left in order here"
        return {"ranks": {}}, reason

    def shrunken(self, kept: Sequence[int], count: int, plan: SequencePlan | None = None) -> Sequence[Pass]:
        """In some order: the copy has other units, and any order has to be as good."""
        counts = [len(set(given)) for given in (self.ranks or {}).values()]
        return [Permute(round_robin=self.round_robin or max(counts, default=1))]

    def apply(self, program: Program) -> Program:
        ranks = program.mesh.get(AXIS, 1)
        if self.request is not None:
            if ranks == 1:
                return record(program, self, "one rank: every order is the same", fired=False)
            raise RewriterError(
                "permute: which heads and channels fit together is measured on the weights, and "
                f"{self.measured_on or 'there is no measurement'}. Convert a checkpoint, or give permute.ranks (by "
                "block, the rank of each of its units)"
            )
        blocks = permutable_units(program)
        chosen = self._chosen(blocks, ranks)
        parameters = dict(program.parameters)
        if not self.applied:
            for block, given in chosen:
                parameters |= permuted(program, block, order_of(given))
        moved = sum(moved_units(given) for _, given in chosen)
        heads = sum(block.heads for block, _ in chosen)
        summary = f"{moved} units to other ranks, in {heads} attention blocks and {len(chosen) - heads} MLP blocks"
        if not chosen:
            summary = "every head and channel stays on the rank that its place on disk gives it"
        elif self.applied:
            summary += "; the weights are in this order already"
        refused: dict[str, list[str]] = {}
        for block in blocks:
            if block.reason is not None:
                refused.setdefault(block.reason, []).append(block.path)
        notes = with_paths(refused, " left in order")
        if self.measured_on:
            notes = (*notes, f"measured: {self.measured_on}")
        return record(program, self, summary, notes, fired=bool(chosen), parameters=parameters)

    def _chosen(self, blocks: Sequence[PermutableUnits], ranks: int) -> list[tuple[PermutableUnits, str]]:
        """The blocks whose units change places, and the rank of each of their units."""
        if self.ranks is None:
            count = self.round_robin or 1
            fit = [block for block in blocks if block.reason is None and block.count % count == 0]
            return [(block, "".join(DIGITS[count - 1 - i % count] for i in range(block.count))) for block in fit]
        known, chosen = {block.path: block for block in blocks}, []
        for path, given in self.ranks.items():
            block = known.get(path)
            if block is None:
                names = ", ".join(list(known)[:3]) + (f" and {len(known) - 3} more" if len(known) > 3 else "")
                raise RewriterError(
                    f"permute: {path!r} is no block with heads or channels. There are {names or 'none'}"
                )
            if block.reason is not None:
                raise RewriterError(f"permute: {path} cannot be reordered: {block.reason}")
            if len(given) != block.count:
                raise RewriterError(f"permute: ranks of {path} name {len(given)} units, it has {block.count}")
            if ranks not in (1, count := len(set(given))):
                raise RewriterError(f"permute: ranks of {path} are for {count} ranks, here are {ranks}. Measure again")
            chosen.append((block, given))
        return chosen


def order_of(ranks: str) -> tuple[int, ...]:
    """The unit that comes to each place, where `ranks` names the rank of every unit; those of a rank keep order."""
    return tuple(sorted(range(len(ranks)), key=lambda unit: (DIGITS.index(ranks[unit]), unit)))


def inverse(order: Sequence[int]) -> tuple[int, ...]:
    """The order that undoes `order`."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def moved_units(ranks: str) -> int:
    """Number of units that go to another rank than by their order on disk."""
    return sum(a != b for a, b in zip(ranks, sorted(ranks, key=DIGITS.index), strict=True))


def permuted(program: Program, block: PermutableUnits, order: Sequence[int]) -> dict[str, Parameter]:
    """The parameters of `block` with its units in another order: unit order[i] at place i."""
    result = {}
    indices: dict[tuple[int, Any], tuple[int, ...]] = {}  # alike parameters share one
    for name, shard in block.places.items():
        known = program.parameters[name]
        size = known.shape[shard.dim]
        key = (size, shard.ranges)
        if key not in indices:
            indices[key] = block.index(name, order, size)
        if known.expression is not None and indices[key] != tuple(range(size)):
            result[name] = replace(known, expression=Take(known.expression, shard.dim, indices[key]))
    return result


@dataclass(frozen=True)
class PermutableUnits:
    """A block's `count` units and where they are: by parameter (canonical runtime name), per unit, ranges along a dim.

    `path` is the block's module; for an MLP whose projections are the layer's own children, its last one. `heads` says
    that units are key/value heads with their queries. `reason` says why the units may not move; None: they
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
        if not body.modules and not body.reads_context:
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
    """(number of units, where they are) of one body. Raises Unsplittable with the reason."""
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

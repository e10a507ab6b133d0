"""The plan of every decoder layer: what each block reads, what becomes of its sum, what crosses to the next layer.

`layer_plans` reads it from the wiring once per Program. Tables, drawings, config.json and the schedule of an engine are
made from it; what a block's mode means, its pass alone declares (`rewriter.ir.marks.Mode`).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

from torch import fx

from rewriter.ir import Leaf, Program, ops, walk_modules
from rewriter.ir.carrying import Carrying, carrying_of, stream_count
from rewriter.ir.communication import Collective, collectives, computed_meanwhile, local_values, split_paths
from rewriter.ir.marks import Mode, block_of, in_stream, marks, running_layer, stream_index
from rewriter.ir.residual import (
    Block,
    BlockKind,
    by_layer,
    residual_blocks,
    stream_values,
    weighted_modules,
)

Reduction = Literal["none", "exposed", "hidden", "dropped"]


@dataclass(frozen=True)
class BlockPlan:
    """One residual block.

    `path` is its main module, `name` that in the layer. `index`: the block writes stream value index + 1. `late`: how
    many blocks before its own place the stream values stand that it reads (0: the newest). `own_part`: with what its
    rank has added since. `ranks_differ`: after the block, ranks hold different values of the stream. `reduction` is
    what becomes of the sum over ranks, "none" on one device and of a `local` block. `meanwhile` is how many blocks
    compute between its start and its wait. `split`: "split", "split in part" or "replicated" over the ranks, "one
    device" on one. `carries`: what becomes of the value that the block adds to.
    """

    name: str
    path: str
    kind: BlockKind
    index: int
    mode: Mode
    reads: tuple[int, ...]
    late: tuple[int, ...]
    own_part: bool
    ranks_differ: bool
    reduction: Reduction
    meanwhile: int
    split: str
    collectives: tuple[Collective, ...]
    local: bool = False
    carries: Carrying = "as it is"


@dataclass(frozen=True)
class ModulePlan:
    """One tensor of a layer: its path in the layer, its size on a rank and in the model (rows first), and how ranks
    divide it: "by output", "by input", "by expert" or "replicated" with the kind of module that holds it."""

    path: str
    kind: str
    sharding: str
    on_rank: tuple[int, ...]
    full: tuple[int, ...]


@dataclass(frozen=True)
class LayerPlan:
    """One decoder layer. `crosses`: the values that it hands to the next one, the residual stream first, which is of
    `streams` vectors of the hidden size.

    `collectives`, `hidden` (behind another block's computation) and `bytes_per_token` count what a forward pass sends.
    """

    layer: int
    blocks: tuple[BlockPlan, ...]
    crosses: tuple[str, ...]
    collectives: int
    hidden: int
    bytes_per_token: int
    streams: int = 1


@dataclass(frozen=True)
class LayerGroup:
    """Consecutive layers, `first` to `last`, of equal plans; `plan` is the first one's."""

    first: int
    last: int
    plan: LayerPlan

    @property
    def blocks(self) -> tuple[BlockPlan, ...]:
        return self.plan.blocks

    @property
    def count(self) -> int:
        return self.last - self.first + 1

    @property
    def label(self) -> str:
        """ "layer 3", "layers 1–4"."""
        return f"layer {self.first}" if self.count == 1 else f"layers {self.first}–{self.last}"

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        own = ("name", "kind", "late", "own_part", "ranks_differ", "reduction", "meanwhile", "carries")
        blocks = [{"mode": b.mode.label} | {name: getattr(b, name) for name in own} for b in self.blocks]
        names = ("crosses", "collectives", "hidden", "bytes_per_token", "streams")
        totals = {name: getattr(self.plan, name) for name in names}
        return {"first": self.first, "last": self.last, "blocks": blocks} | totals


def layer_plans(program: Program) -> tuple[LayerPlan, ...]:
    """The plan of every decoder layer, in order; empty for a model without a residual stream."""
    known: tuple[LayerPlan, ...] | None = program.__dict__.get("_layer_plans")
    if known is None:
        known = _Planner(program).plans()
        object.__setattr__(program, "_layer_plans", known)
    return known


def grouped(plans: Sequence[LayerPlan]) -> list[LayerGroup]:
    """Neighbouring layers of equal plans together."""
    groups = []
    for _, run in groupby(plans, key=relative):
        members = list(run)
        groups.append(LayerGroup(members[0].layer, members[-1].layer, members[0]))
    return groups


def relative(plan: LayerPlan) -> LayerPlan:
    """The plan without what differs between layers of one kind: numbers of layers and blocks."""
    blocks = tuple(replace(b, path=b.name, index=0, reads=(), collectives=()) for b in plan.blocks)
    return replace(plan, layer=0, blocks=blocks)


class _Planner:
    def __init__(self, program: Program) -> None:
        self.program, self.graph = program, program.graph
        self.blocks = residual_blocks(program)
        self.stream = stream_values(self.graph)
        self.local = local_values(self.graph, program.parameters) if program.mesh else set()
        self.streams = stream_count(program) if self.blocks else 1
        self.sent = collectives(program)
        self.split_paths = split_paths(program.parameters)
        meanwhile = computed_meanwhile(self.graph, program.modules)
        self.meanwhile = {block_of(n): len({*blocks} - {block_of(n), None}) for n, blocks in meanwhile.items()}

    def plans(self) -> tuple[LayerPlan, ...]:
        crossing = _crossing(self.graph, self.program.source.num_layers, self.local)
        plans = []
        for layer, members in sorted(by_layer(self.blocks).items()):
            own = [c for c in self.sent if c.layer == layer]
            traffic = len(own), sum(c.hidden for c in own), sum(c.bytes_per_token for c in own)
            plans.append(LayerPlan(layer, tuple(map(self._block, members)), crossing[layer], *traffic, self.streams))
        return tuple(plans)

    def _block(self, block: Block) -> BlockPlan:
        mine = tuple(c for c in self.sent if c.block == block.index)
        reductions = [c for c in mine if c.place == "block"]
        reduction: Reduction = "dropped" if any(marks(n).dropped for n in block.branch) else "none"
        if reductions:
            reduction = "hidden" if all(c.hidden for c in reductions) else "exposed"
        parts = [path in self.split_paths for path in weighted_modules(block, self.program.modules)]
        split = "split" if all(parts) and parts else "split in part" if any(parts) else "replicated"
        return BlockPlan(
            name=block.path.rpartition(".")[2] if block.kind != "parallel" else "attention + mlp",
            path=block.path,
            kind=block.kind,
            index=block.index,
            mode=block.mode,
            reads=block.reads,
            late=tuple(sorted({block.index - read for read in block.reads})),
            own_part=block.mode.reads == "earlier_and_own" and block.reads != (block.index,),
            ranks_differ=self.stream[block.index + 1] in self.local,
            reduction=reduction,
            meanwhile=self.meanwhile.get(block.index, 0),
            split=split if self.program.mesh else "one device",
            collectives=mine,
            local=block.local,
            carries=carrying_of(block, self.program, self.streams),
        )


def _crossing(graph: fx.Graph, layers: int, local: set[fx.Node]) -> list[tuple[str, ...]]:
    """By layer, the values that later layers, or what follows them, read of it and of layers before."""
    nodes = list(graph.nodes)
    order = {node: place for place, node in enumerate(nodes)}
    first = next((place for place, node in enumerate(nodes) if running_layer(node) is not None), len(nodes))

    def ran_in(node: fx.Node) -> int:
        """The layer that runs a node; -1 before the first layer, `layers` after the last."""
        layer = running_layer(node)
        return layer if layer is not None else -1 if order[node] < first else layers

    until = {
        node: max(map(ran_in, node.users), default=-1)
        for node in nodes
        if in_stream(node) or running_layer(node) is not None
    }
    crossing = []
    for layer in range(layers):
        alive = [n for n, last in until.items() if ran_in(n) <= layer < last]
        newest = max((stream_index(n) for n in alive if in_stream(n)), default=0)
        alive.sort(key=lambda n: (0, newest - stream_index(n)) if in_stream(n) else (1, order[n]))
        crossing.append(tuple(dict.fromkeys(_said(n, newest, local) for n in alive)))
    return crossing


def _said(node: fx.Node, newest: int, local: set[fx.Node]) -> str:
    """A value that crosses from layer to layer: "x", "x of 1 block before", "mlp's sum, on its way", "mlp's sum"."""
    own = "this rank's own " if node in local and node.target is not ops.all_reduce_start else ""
    if in_stream(node):
        age = newest - stream_index(node)
        return f"{own}x" + (f" of {age} block{'s' * (age > 1)} before" if age else "")
    made = node
    while made.op != "call_module" and made.all_input_nodes:
        made = made.all_input_nodes[-1]
    name = str(made.target).rpartition(".")[2]
    if node.target is ops.all_reduce_start:
        return f"{name}'s sum, on its way"
    if node.target in (ops.all_reduce, ops.all_reduce_wait):
        return f"{name}'s sum"
    made_by = node.op == "call_module" or node.target is operator.getitem  # gates, streams that a module carries on
    return f"{own}{name}" if made_by else f"{own}part of x"


# --- the tensors of a layer


def module_plans(program: Program, layer: int) -> list[ModulePlan]:
    """Every tensor of a layer in the order of its modules, and how ranks hold it: all of its sharding on a screen."""
    prefix = f"{program.layer_path(layer)}."
    kinds = {
        f"{path}.{name}": module.kind if isinstance(module, Leaf) else module.class_name
        for path, module in walk_modules(program.modules)
        if path.startswith(prefix)
        for name in module.parameters
    }
    plans = []
    for name, parameter in program.parameters.items():
        if not name.startswith(prefix):
            continue
        full = parameter.full_shape or parameter.shape
        sharding = "replicated"
        if parameter.ranges is not None:
            experts = len(full) == 3 and parameter.dim == 0
            by_input = parameter.dim == len(full) - 1 and len(full) > 1
            sharding = "by expert" if experts else "by input" if by_input else "by output"
            if parameter.shared:
                sharding += ", key/value heads repeated"
        plans.append(ModulePlan(name.removeprefix(prefix), kinds.get(name, ""), sharding, parameter.shape, full))
    children = list(dict.fromkeys(plan.path.partition(".")[0] for plan in plans))
    return sorted(plans, key=lambda plan: children.index(plan.path.partition(".")[0]))

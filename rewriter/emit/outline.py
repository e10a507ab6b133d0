"""The wiring cut into layers, and layers into segments between collectives. Pure analysis; printing is elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from rewriter import ops
from rewriter.common.errors import RewriterError
from rewriter.ir.marks import in_stream, marks, running_layer

SCHEDULED = frozenset({ops.all_reduce, ops.all_reduce_start, ops.all_reduce_wait, ops.all_gather, ops.repeat_shard})


@dataclass(frozen=True)
class Region:
    """Consecutive wiring nodes. `inputs` come from outside in order of definition, `outputs` are used outside."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Outline:
    """What runs before the layers, each layer, and after them."""

    before: tuple[fx.Node, ...]
    layers: tuple[Region, ...]
    after: tuple[fx.Node, ...]


def outline(graph: fx.Graph, num_layers: int) -> Outline:
    """Cut a wiring by the layer that runs each node. Raises RewriterError when layers interleave."""
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    of_layer: dict[int, list[fx.Node]] = {i: [] for i in range(num_layers)}
    before: list[fx.Node] = []
    after: list[fx.Node] = []
    reached = -1
    for node in nodes:
        layer = running_layer(node)
        if layer is None:
            (before if reached < 0 else after).append(node)
            continue
        if layer < reached:
            where = "after" if after else "inside"
            raise RewriterError(f"{node.name} of layer {layer} is scheduled {where} layer {reached}")
        reached = layer
        of_layer[layer].append(node)
    # what stands between layers but belongs to none (a constant, say) runs first if it needs no layer
    early = [n for n in after if not _needs_layer(n)]
    before += early
    after = [n for n in after if n not in set(early)]
    order = {n: i for i, n in enumerate(graph.nodes)}
    regions = tuple(region(of_layer[i], order) for i in range(num_layers))
    return Outline(tuple(before), regions, tuple(after))


def with_values_in_flight(cut: Outline) -> Outline:
    """The same outline, with values that only pass a layer by made its inputs and outputs.

    A loop over alike layers then sees the same number of values in flight before and after each.
    """
    last = {n: i for i, r in enumerate(cut.layers) for n in r.inputs}
    last |= {n: len(cut.layers) for node in cut.after for n in node.all_input_nodes}
    live = {n for n in cut.before if in_stream(n)}
    layers = []
    for index, layer in enumerate(cut.layers):
        passing = tuple(n for n in live if n not in layer.inputs and last.get(n, -1) > index)
        kept = tuple(n for n in layer.inputs if n in live and last[n] > index)
        layers.append(Region(layer.nodes, layer.inputs + passing, layer.outputs + passing + kept))
        live = set(layers[-1].outputs)
    return Outline(cut.before, tuple(layers), cut.after)


def _needs_layer(node: fx.Node) -> bool:
    todo, seen = [node], set()
    while todo:
        current = todo.pop()
        if marks(current).layer is not None:
            return True
        if current not in seen:
            seen.add(current)
            todo += current.all_input_nodes
    return False


def region(nodes: Iterable[fx.Node], order: dict[fx.Node, int]) -> Region:
    """The region of `nodes`, with its inputs and outputs."""
    inside = list(nodes)
    members = set(inside)
    inputs = {source for node in inside for source in node.all_input_nodes if source not in members}
    outputs = [node for node in inside if any(user not in members for user in node.users)]
    return Region(tuple(inside), tuple(sorted(inputs, key=order.__getitem__)), tuple(outputs))


def segments(layer: Region, order: dict[fx.Node, int]) -> list[Region | fx.Node]:
    """A layer as computation (Regions, all or nothing of which runs in a branch) and collectives (nodes), in order."""
    result: list[Region | fx.Node] = []
    for (scheduled, _), run in itertools.groupby(layer.nodes, key=lambda n: (n.target in SCHEDULED, marks(n).beside)):
        nodes = list(run)
        result += nodes if scheduled else [region(nodes, order)]
    return result

"""One order of the calls around a model's layers, whatever order the model makes them in.

Some models call a module once per type of layer by iterating over a `set` (rotary embeddings), so that the order of
calls that do not depend on each other differs between processes. What stands before, between and after the layers is
therefore ordered by first use: as a walk back from the layers, first to last, and then from the logits finds it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import fx

from rewriter.ir import args_of
from rewriter.tracing.recorded_calls import base_name, layer_number, variant_name


def sort_by_use(graph: fx.Graph) -> dict[str, str]:
    """Sort the exported graph around the layers in place, and number the variants of its modules in the new order.

    Returns the new name of each variant. Layers and placeholders keep their places, and nothing passes a layer.
    """
    calls = [n for n in graph.nodes if n.target is torch.ops.rewriter_trace.call.default]
    layers = {n for n in calls if layer_number(args_of(n)[1]) is not None}
    place = _by_first_use([*(n for n in calls if n in layers), graph.output_node()])
    between: dict[int, list[fx.Node]] = {0: []}  # by number of layers before
    for node in graph.nodes:
        if node.op not in ("placeholder", "output"):
            between.setdefault(len(between) - 1 + (node in layers), []).append(node)
    for nodes in between.values():
        for node in sorted(nodes, key=lambda n: place.get(n, len(place))):  # what nothing reads comes last
            graph.output_node().prepend(node)
    modules = [n for n in graph.nodes if n in set(calls) - layers]
    names = _numbered(args_of(n)[1] for n in modules)
    for node in modules:
        node.args = (args_of(node)[0], names[args_of(node)[1]])
    return names


def _by_first_use(roots: Iterable[fx.Node]) -> dict[fx.Node, int]:
    """The places of the roots and all that they read, each after what it reads itself."""
    found: dict[fx.Node, int] = {}
    todo = [(root, False) for root in reversed([*roots])]
    while todo:
        node, ready = todo.pop()
        if node in found:
            continue
        if ready:
            found[node] = len(found)
        else:
            todo += [(node, True), *((source, False) for source in reversed(node.all_input_nodes))]
    return found


def _numbered(variants: Iterable[str]) -> dict[str, str]:
    counts: Counter[str] = Counter()
    names: dict[str, str] = {}
    for variant in dict.fromkeys(variants):
        base = base_name(variant)
        names[variant] = variant_name(base, counts[base])
        counts[base] += 1
    return names

"""Finding the residual stream of a wiring as traced.

Every path from the first layer's hidden state to the last layer's passes certain values (dominators). Between
neighbours among them stands a *block*, X' = K(X) + b(X) ⊗ F, or a local function of the value. The values that blocks
make, with the first one, are the stream. F is what modules compute that ranks share (attention, mixers, experts, wide
projections), from c(X); K, b and c are any functions of one token, the same on every rank: the value itself, a norm, a
product with stored factors, a mixture of several streams.

`annotate` leaves what it finds as marks (`rewriter.ir.marks`), which passes keep, so that
`rewriter.ir.residual.residual_blocks` also reads rewired programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import fx

from rewriter.common.errors import RewriterError
from rewriter.common.text_settings import stream_width
from rewriter.ir import Leaf, Module, Opaque, Program, nodes_inside, ops, placeholders, reachable
from rewriter.ir.labels import is_tensor, value_of
from rewriter.ir.marks import layer_of, mark, marks
from rewriter.ir.op_semantics import data_of
from rewriter.ir.residual import (
    Block,
    attends,
    carries_state,
    computes,
    has_experts,
    has_projection,
    is_add,
    stream_values,
    terms_of,
)


class NoStream(RewriterError):
    """A model has no residual stream: `node` of its wiring should be a value of it, and is no sum."""

    def __init__(self, message: str, node: fx.Node) -> None:
        super().__init__(message)
        self.node = node


@dataclass(frozen=True)
class _Found:
    """A block that makes the value `end`: its `work`, the calls whose results are summed over ranks; `local`: it has
    none, and its `work` is what multiplies by narrow weights."""

    end: fx.Node
    work: tuple[fx.Node, ...]
    local: bool


def annotate(graph: fx.Graph, modules: Mapping[str, Module], num_layers: int, width: int) -> None:
    """Mark the residual stream of a wiring as traced; `width` is the model's hidden size.

    Raises NoStream when the model has none.
    """
    inside = [n for n in graph.nodes if marks(n).layer is not None]
    entry = next((n for n in graph.nodes if marks(n).hidden), None)
    last = [n for n in inside if marks(n).layer == num_layers - 1]
    if entry is None or not last:
        raise RewriterError("the model has no decoder layers in its wiring")
    values, paths = _on_every_path([entry, *inside], entry, last[-1])
    blocks: list[_Found] = []
    place = {node: i for i, node in enumerate(paths)}
    for begin, end in reversed(list(pairwise(values))):
        between = paths[place[begin] + 1 : place[end] + 1]
        if (found := _block(between, begin, modules, width)) is not None:
            blocks.insert(0, found)
    if not blocks:
        raise _no_stream(last[-1])
    mark(entry, stream=0)
    for index, block in enumerate(blocks, start=1):
        mark(block.end, stream=index, local=block.local)
    stream = {entry, *(block.end for block in blocks)}
    for index, block in enumerate(blocks):
        _mark_block(index, block, stream)


def why_no_stream(program: Program) -> str | None:
    """The reason for which `annotate` fails, in a sentence; None for a program with a residual stream."""
    if stream_values(program.graph):
        return None
    try:
        width = stream_width(program.source.config) or 0
        annotate(program.edit()[0], program.modules, program.source.num_layers, width)
    except RewriterError as error:
        return str(error)
    return None


def _on_every_path(nodes: Sequence[fx.Node], entry: fx.Node, end: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """(the values that every path from `entry` to `end` passes, all values on some path), in order.

    No edge between two values on paths leads past a value that is on every path, and past any other one some edge does.
    """
    after = {entry}
    for node in nodes:
        if not after.isdisjoint(_sources(node)):
            after.add(node)
    before = {*reachable([end], lambda n: (s for s in _sources(n) if s in after))}
    paths = [n for n in nodes if n in after and n in before]
    place = {node: i for i, node in enumerate(paths)}
    farthest = {source: place[node] for node in paths for source in _sources(node) if source in place}
    reached, values = 0, []
    for i, node in enumerate(paths):
        if reached <= i:
            values.append(node)
        reached = max(reached, farthest.get(node, i))
    return values, paths


def _sources(node: fx.Node) -> list[fx.Node]:
    """The values that flow into a node's: not what lends a dtype or sizes, nor what an earlier layer hands on beside
    its hidden state."""
    return [n for n in data_of(node) if marks(n).handed_on is None]


def _block(between: Sequence[fx.Node], begin: fx.Node, modules: Mapping[str, Module], width: int) -> _Found | None:
    """The block that the nodes after a value and up to the next one are; None for a local function.

    Raises NoStream where modules that ranks share compute, and the end is no sum of something that skips them.
    """
    end, calls = between[-1], [n for n in between if n.op == "call_module"]
    summed = [n for n in calls if is_summed(modules[str(n.target)], width)]
    work = summed or [n for n in calls if weighs(modules[str(n.target)])]
    if not work:
        return None
    on_path = {begin, *between}
    computed = {*reachable(work, lambda n: (u for u in n.users if u in on_path))}
    terms = terms_of(end, computed)
    if is_add(end) and computed.intersection(terms) and any(t in on_path for t in terms if t not in computed):
        return _Found(end, tuple(work), not summed)
    if not summed:
        return None
    raise _no_stream(end)


def _no_stream(value: fx.Node) -> NoStream:
    where = f"the output of {value.target}" if value.op == "call_module" else f"the result of {value.name}"
    return NoStream(
        f"no residual stream: in layer {layer_of(value)}, {where} is not an earlier value plus a value "
        "computed from it; there is nothing to rewire.",
        value,
    )


def _mark_block(index: int, block: _Found, stream: set[fx.Node]) -> None:
    """Mark the nodes of a block: those of F and c as `block`, those of K and b as `carry`; what both need, as both."""

    def inside(node: fx.Node) -> Iterable[fx.Node]:
        return (s for s in _sources(node) if s not in stream and marks(s).layer is not None)

    work = set(block.work)
    late = {*reachable(block.work, inside)}
    fresh = {*reachable([block.end], lambda n: () if n in work else inside(n))} - work
    computed = {*reachable(block.work, lambda n: (u for u in n.users if u not in stream))}
    first = [n for n in fresh if not stream.isdisjoint(data_of(n))]
    own = {*reachable(first, lambda n: (u for u in n.users if u in fresh))}
    for node in {*late, *fresh} - {block.end}:
        if node in late or node in computed:
            mark(node, block=index)
        if (node in late and node in own) or not (node in late or node in computed):
            mark(node, carry=index)


def is_summed(module: Module, width: int) -> bool:
    """True if ranks share what a module computes, and sum it, whatever this version can split.

    Attention, mixers with a state, experts, and projections of hidden states at least half as wide inside as the
    stream. What is narrower (embeddings per layer, adapters, coefficients), projections of embeddings of a layer's own
    ids and convolutions alone are local: a sum would cost more than it saves.
    """
    if isinstance(module, Opaque):
        return any(len(s) > 2 or (len(s) == 2 and 2 * min(s) >= width) for s in module.parameters.values())
    few = (ops.causal_conv, ops.preceded)
    recurs = any(n.target in ops.RECURRENT and n.target not in few for _, n in nodes_inside(module))
    return attends(module) or recurs or has_experts(module) or _is_wide(module, width)


def _is_wide(module: Module, width: int) -> bool:
    if isinstance(module, Leaf):
        return has_projection(module) and 2 * min(module.parameters["weight"]) >= width
    hidden = [n for n in placeholders(module.graph) if is_tensor(n) and value_of(n).dtype.is_floating_point]
    reading = reachable(hidden, lambda n: n.users)
    return any(n.op == "call_module" and _is_wide(module.modules[str(n.target)], width) for n in reading)


def weighs(module: Module) -> bool:
    """True if a module multiplies by weight matrices, attends or keeps a state, in contrast to norms and glue."""
    return isinstance(module, Opaque) or attends(module) or carries_state(module) or computes(module)


def write_calls(block: Block, modules: Mapping[str, Module]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(paths of the modules whose results a block adds, those of the norms between these and the stream)."""
    inside = set(block.branch)

    def before(node: fx.Node) -> Iterable[fx.Node]:
        ends = node.op == "call_module" and weighs(modules[str(node.target)])
        return () if ends else (n for n in data_of(node) if n in inside)

    calls = [n for n in reachable(block.writes, before) if n.op == "call_module"]
    sums: list[str] = []
    tails: list[str] = []
    for node in calls:
        (sums if weighs(modules[str(node.target)]) else tails).append(str(node.target))
    return tuple(dict.fromkeys(sums)), tuple(dict.fromkeys(tails))

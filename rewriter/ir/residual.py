"""The residual stream: which values it takes, and which block reads and writes where.

`annotate` finds the stream once, in the wiring as traced, and leaves marks (`rewriter.ir.marks`) that passes keep, so
that `residual_blocks` also reads rewired programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from rewriter.common.errors import RewriterError
from rewriter.ir import Body, Leaf, Module, Opaque, Program, args_of, nodes_inside, ops, reachable
from rewriter.ir.marks import STANDARD, Mode, in_stream, layer_of, mark, marks, stream_index
from rewriter.ir.op_semantics import function_of

BlockKind = Literal["attention", "mlp", "moe", "mixer", "parallel"]


@dataclass(frozen=True)
class Block:
    """One residual block: `stream[index + 1] = carried + Σ writes`.

    `carried` is stream[index] (`skip`) itself, or a multiple of it by numbers.

    `reads` are the stream indices that its branch starts from: (index,) in a standard model. `branch` are the wiring
    nodes from the reads to the writes, in order. `path` names its main module. In a desynced block the writes are what
    the rank adds to its own residual, and `add`, stream[index + 1], may be the reduction that synchronises the ranks.
    """

    index: int
    layer: int
    kind: BlockKind
    path: str
    add: fx.Node
    skip: fx.Node
    carried: fx.Node
    writes: tuple[fx.Node, ...]
    reads: tuple[int, ...]
    branch: tuple[fx.Node, ...]
    mode: Mode = STANDARD


class NoStream(RewriterError):
    """A model has no residual stream: `node` of its wiring should be a value of it, and is no sum."""

    def __init__(self, message: str, node: fx.Node) -> None:
        super().__init__(message)
        self.node = node


def is_add(node: fx.Node) -> bool:
    """True if `node` adds two tensors of the wiring."""
    operands = [a for a in node.args if isinstance(a, fx.Node)]
    return function_of(node) == "add" and len(operands) == len(node.args) == 2 and not node.kwargs


def is_scaling(node: fx.Node) -> bool:
    """True if `node` multiplies a value of a layer's wiring by a number, or divides it by one.

    An ATen operator stands around the layers (Granite scales its embeddings): what it makes is a value like any other.
    """
    aten_operator = isinstance(node.target, torch._ops.OpOverload)
    return not aten_operator and function_of(node) in ("mul", "div") and len(node.all_input_nodes) == 1


def annotate(graph: fx.Graph, num_layers: int) -> None:
    """Mark the residual stream of a wiring as traced. Raises RewriterError when the model has none."""
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    ancestors: dict[fx.Node, int] = {}
    for i, node in enumerate(nodes):
        bits = 1 << i
        for source in node.all_input_nodes:
            bits |= ancestors[source]
        ancestors[node] = bits
    last = [n for n in nodes if marks(n).layer == num_layers - 1]
    if not last:
        raise RewriterError("the model has no decoder layers in its wiring")
    value = last[-1]
    stream: list[tuple[fx.Node, fx.Node]] = []
    while marks(value).layer is not None:
        terms = terms_of(value)
        skips = [t for t in terms if all(u is t or ancestors[u] >> position[_unscaled(t)] & 1 for u in terms)]
        if len(set(terms)) < 2 or not skips:
            where = f"the output of {value.target}" if value.op == "call_module" else f"the result of {value.name}"
            raise NoStream(
                f"no residual stream: in layer {layer_of(value)}, {where} is not the sum of an earlier value and "
                "what was computed from it. Post-norm models have none; there is nothing to rewire.",
                value,
            )
        stream.append((value, skips[0]))
        value = _unscaled(skips[0])
    mark(value, stream=0)
    for index, (node, _) in enumerate(reversed(stream), start=1):
        mark(node, stream=index)
    for index, (node, skip) in enumerate(reversed(stream)):
        branch, _ = _branch(index, [t for t in terms_of(node) if t is not skip], position)
        for inner in (*branch, *_inner_sums(node)):
            mark(inner, block=index)


def terms_of(value: fx.Node) -> list[fx.Node]:
    """The summands of an add; an inner sum that nothing else reads is taken apart."""
    if not is_add(value):
        return [value]
    return [term for operand in args_of(value) for term in (terms_of(operand) if is_inner(operand) else [operand])]


def _unscaled(term: fx.Node) -> fx.Node:
    """The value of which `term` is a multiple by numbers."""
    while is_scaling(term):
        term = term.all_input_nodes[0]
    return term


def is_inner(operand: fx.Node) -> bool:
    """True if a value is an add that one node reads, and no value of the stream."""
    return is_add(operand) and len(operand.users) == 1 and not in_stream(operand)


def _inner_sums(value: fx.Node) -> list[fx.Node]:
    """The adds that `terms_of` takes apart, without `value` itself."""
    inner = [n for n in value.all_input_nodes if is_inner(n)] if is_add(value) else []
    return inner + [n for i in inner for n in _inner_sums(i)]


def stream_values(graph: fx.Graph) -> list[fx.Node]:
    """The values of the stream, in order; empty when the model has none."""
    marked = {stream_index(n): n for n in graph.nodes if in_stream(n)}
    return [marked[i] for i in range(len(marked))]


def residual_blocks(program: Program) -> tuple[Block, ...]:
    """The blocks of the stream, in order; empty when the model has no residual stream."""
    return blocks_of(program.graph, program.modules)


def by_layer(blocks: Iterable[Block]) -> dict[int, list[Block]]:
    """The blocks of each layer, in order."""
    layers: dict[int, list[Block]] = {}
    for block in blocks:
        layers.setdefault(block.layer, []).append(block)
    return layers


def blocks_of(graph: fx.Graph, modules: Mapping[str, Module]) -> tuple[Block, ...]:
    """`residual_blocks` of a wiring that is being edited."""
    stream = stream_values(graph)
    order = {node: i for i, node in enumerate(graph.nodes)}
    members: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if (block := marks(node).block) is not None:
            members.setdefault(block, []).append(node)
    blocks = []
    for index in range(len(stream) - 1):
        skip, add = stream[index], stream[index + 1]
        mode = marks(add).mode or STANDARD
        if mode.own_residual:
            inside = members.get(index, [])
            writes = tuple(n for n in inside if any(marks(u).block != index for u in n.users))
        else:
            writes = tuple(t for t in terms_of(add) if _unscaled(t) is not skip)
        carried = next((t for t in terms_of(add) if _unscaled(t) is skip), skip)
        branch, reads = _branch(index, writes, order)
        calls = [n for n in branch if n.op == "call_module"]
        kind, main = _kind(modules, calls)
        path = str(main.target).rpartition(".")[0] if kind == "parallel" else str(main.target)
        blocks.append(Block(index, layer_of(main), kind, path, add, skip, carried, writes, reads, branch, mode))
    return tuple(blocks)


def _branch(
    index: int, writes: Iterable[fx.Node], order: Mapping[fx.Node, int]
) -> tuple[tuple[fx.Node, ...], tuple[int, ...]]:
    """(nodes of block `index` between the stream and the writes in graph order, stream indices read)."""

    def inside(node: fx.Node) -> bool:
        own = marks(node).layer is not None and marks(node).block in (None, index)
        return own and node.op != "placeholder" and read_index(node) is None

    nodes = reachable(writes, lambda node: node.all_input_nodes if inside(node) else ())
    reads = {read for node in nodes if (read := read_index(node)) is not None}
    return tuple(sorted(filter(inside, nodes), key=order.__getitem__)), tuple(sorted(reads))


def read_index(node: fx.Node) -> int | None:
    """Index of the stream value that a node is, or stands for where a block reads it; None for every other node."""
    return marks(node).reads if marks(node).stream is None else marks(node).stream


def _kind(modules: Mapping[str, Module], calls: list[fx.Node]) -> tuple[BlockKind, fx.Node]:
    """(kind, call of the main module) of a branch."""
    if not calls:
        raise RewriterError("a block of the residual stream calls no module")
    kinds: dict[BlockKind, fx.Node] = {}
    for node in calls:
        module = modules[str(node.target)]
        if attends(module):
            kinds.setdefault("attention", node)
            if isinstance(module, Body) and len(module.merged) > 1:
                return "parallel", node
        elif _has_experts(module):
            kinds.setdefault("moe", node)
        elif isinstance(module, Opaque) or carries_state(module):
            kinds.setdefault("mixer", node)
        elif _has_projection(module):
            kinds.setdefault("mlp", node)
    if "attention" in kinds and {"moe", "mlp"} & kinds.keys():
        return "parallel", kinds["attention"]
    for kind in ("attention", "mixer", "moe", "mlp"):
        if kind in kinds:
            return kind, kinds[kind]
    return "mixer", calls[-1]


def attends(module: Module) -> bool:
    """True if an attention node is anywhere inside."""
    return any(node.target is ops.attention for _, node in nodes_inside(module))


def carries_state(module: Module) -> bool:
    """True if a recurrence or a convolution over tokens is anywhere inside."""
    return any(node.target in ops.RECURRENT for _, node in nodes_inside(module))


def _has_experts(module: Module) -> bool:
    return any(node.target is ops.experts for _, node in nodes_inside(module))


def _has_projection(module: Module) -> bool:
    if isinstance(module, Leaf):
        return "Linear" in module.kind or "Conv1D" in module.kind
    return any(map(_has_projection, module.modules.values()))


def computes(module: Module) -> bool:
    """True if it multiplies by weight matrices, in contrast to norms and glue."""
    return _has_projection(module) or _has_experts(module)


def weighted_modules(block: Block, modules: Mapping[str, Module]) -> list[str]:
    """Paths of the modules of a block that multiply by weights, in order."""
    called = [str(node.target) for node in block.branch if node.op == "call_module"]
    return [path for path in called if computes(modules[path])]

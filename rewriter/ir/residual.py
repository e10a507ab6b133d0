"""The residual stream: which values it takes, and which block reads and writes where.

`rewriter.ir.stream.annotate` finds the stream once, in the wiring as traced, and leaves marks (`rewriter.ir.marks`)
that passes keep, so that `residual_blocks` also reads rewired programs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from rewriter.common.errors import RewriterError
from rewriter.ir import Body, Leaf, Module, Opaque, Program, args_of, nodes_inside, ops, reachable
from rewriter.ir.marks import STANDARD, Mode, block_of, in_stream, layer_of, marks, stream_index
from rewriter.ir.op_semantics import data_of, function_of

BlockKind = Literal["attention", "mlp", "moe", "mixer", "parallel"]


@dataclass(frozen=True)
class Block:
    """One residual block: `stream[index + 1] = Σ carried + Σ writes`, X' = K(X) + b(X) ⊗ F.

    `carried` are made of stream[index] (`skip`) alone: K(X), most often `skip` itself. `local`: ranks do not share what
    it computes, so that it has no sum over them.

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
    carried: tuple[fx.Node, ...]
    writes: tuple[fx.Node, ...]
    reads: tuple[int, ...]
    branch: tuple[fx.Node, ...]
    mode: Mode = STANDARD
    local: bool = False


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


def terms_of(value: fx.Node, through: Collection[fx.Node] = ()) -> list[fx.Node]:
    """The summands of an add; an inner sum that nothing else reads is taken apart.

    Where all summands are among `through`, of those the first one that is a sum is taken apart as well: a layer may go
    on from a sum before it adds more to it.
    """
    if not is_add(value):
        return [value]
    terms = [t for operand in args_of(value) for t in (terms_of(operand) if is_inner(operand) else [operand])]
    while through and all(term in through for term in terms):
        inner = next((term for term in terms if is_add(term) and not in_stream(term)), None)
        if inner is None:
            break
        place = terms.index(inner)
        terms[place : place + 1] = terms_of(inner)
    return terms


def is_inner(operand: fx.Node) -> bool:
    """True if a value is an add that one node reads, and no value of the stream."""
    return is_add(operand) and len(operand.users) == 1 and not in_stream(operand)


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
        mode, local = marks(add).mode or STANDARD, marks(add).local
        inside = members.get(index, [])
        terms = terms_of(add, inside)
        if mode.own_residual:
            writes = tuple(n for n in inside if any(marks(u).block != index for u in n.users))
        else:
            writes = tuple(t for t in terms if t is not skip and marks(t).carry is None)
        carried = tuple(t for t in terms if t is skip or marks(t).carry is not None) or (skip,)
        branch, reads = _branch(index, writes, order)
        calls = [n for n in branch if n.op == "call_module"]
        kind, main = _kind(modules, calls)
        path = _layer_path(main) if kind == "parallel" else str(main.target)
        blocks.append(Block(index, layer_of(main), kind, path, add, skip, carried, writes, reads, branch, mode, local))
    return tuple(blocks)


def _layer_path(node: fx.Node) -> str:
    """The path of the module around a call of a child; of an item of a list, around the list."""
    parent, _, name = str(node.target).rpartition(".")
    return parent.rpartition(".")[0] if name.isdecimal() else parent


def _branch(
    index: int, writes: Iterable[fx.Node], order: Mapping[fx.Node, int]
) -> tuple[tuple[fx.Node, ...], tuple[int, ...]]:
    """(nodes of block `index` between the stream and the writes in graph order, stream indices read)."""

    def inside(node: fx.Node) -> bool:
        own = marks(node).layer is not None and marks(node).block in (None, index) and not is_carry(node)
        return own and node.op != "placeholder" and read_index(node, index) is None

    nodes = reachable(writes, lambda node: data_of(node) if inside(node) else ())
    reads = {read for node in nodes if (read := read_index(node, index)) is not None}
    return tuple(sorted(filter(inside, nodes), key=order.__getitem__)), tuple(sorted(reads))


def is_carry(node: fx.Node) -> bool:
    """True if a value is made for what a block carries on or scales by, and for nothing that it reads."""
    return marks(node).carry is not None and marks(node).block is None


def read_index(node: fx.Node, block: int | None = None) -> int | None:
    """Index of the stream value that a node is, or stands for where a block reads it; None for every other node.

    What another block than number `block` carries on, where one is named, stands for the value that it carries.
    """
    own = marks(node)
    if own.stream is None and own.reads is None:
        return own.carry if block is not None and own.carry != block else None
    return own.reads if own.stream is None else own.stream


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
        elif has_experts(module):
            kinds.setdefault("moe", node)
        elif isinstance(module, Opaque) or carries_state(module):
            kinds.setdefault("mixer", node)
        elif has_projection(module):
            kinds.setdefault("mlp", node)
    if "attention" in kinds and _beside(kinds["attention"], [n for k, n in kinds.items() if k in ("moe", "mlp")]):
        return "parallel", kinds["attention"]
    for kind in ("attention", "mixer", "moe", "mlp"):
        if kind in kinds:
            return kind, kinds[kind]
    return "mixer", calls[-1]


def _beside(attention: fx.Node, others: Iterable[fx.Node]) -> bool:
    """True if some other call neither reads what attention makes (its projection does, where a layer calls that by
    itself, as BERT's) nor makes what attention reads."""
    index = block_of(attention)
    after = {*reachable([attention], lambda n: (u for u in n.users if block_of(u) == index))}
    before = {*reachable([attention], lambda n: (s for s in n.all_input_nodes if block_of(s) == index))}
    return any(node not in after and node not in before for node in others)


def attends(module: Module) -> bool:
    """True if an attention node is anywhere inside."""
    return any(node.target is ops.attention for _, node in nodes_inside(module))


def carries_state(module: Module) -> bool:
    """True if a recurrence or a convolution over tokens is anywhere inside."""
    return any(node.target in ops.RECURRENT for _, node in nodes_inside(module))


def has_experts(module: Module) -> bool:
    return any(node.target is ops.experts for _, node in nodes_inside(module))


def has_projection(module: Module) -> bool:
    if isinstance(module, Leaf):
        return "Linear" in module.kind or "Conv1D" in module.kind
    return any(map(has_projection, module.modules.values()))


def computes(module: Module) -> bool:
    """True if it multiplies by weight matrices, in contrast to norms and glue."""
    return has_projection(module) or has_experts(module)


def weighted_modules(block: Block, modules: Mapping[str, Module]) -> list[str]:
    """Paths of the modules of a block that multiply by weights, in order."""
    called = [str(node.target) for node in block.branch if node.op == "call_module"]
    return [path for path in called if computes(modules[path])]

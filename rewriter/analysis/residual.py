"""The residual stream: which values it takes, and which block reads and writes where.

`annotate` finds the stream once, in the wiring as traced, and marks its values with `meta["stream"]` = 0 (what the
first block reads), 1, 2, …; passes keep the marks, so `residual_blocks` also reads rewired programs.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import fx

from rewriter import ops
from rewriter.errors import RewriterError
from rewriter.program import Body, Leaf, Module, Program

BlockKind = Literal["attention", "mlp", "moe", "mixer", "parallel"]

_ADDS = (operator.add, operator.iadd, torch.add, torch.ops.aten.add.Tensor)


@dataclass(frozen=True)
class Block:
    """One residual block: `stream[index + 1] = stream[index] + Σ writes`.

    `reads` are the stream indices that its branch starts from: (index,) in a standard model. `branch` are the wiring
    nodes from the reads to the writes, in order. `path` names its main module.
    """

    index: int
    layer: int
    kind: BlockKind
    path: str
    add: fx.Node
    skip: fx.Node
    writes: tuple[fx.Node, ...]
    reads: tuple[int, ...]
    branch: tuple[fx.Node, ...]


def is_add(node: fx.Node) -> bool:
    """Whether `node` adds two tensors of the wiring."""
    if node.op == "call_method":
        return node.target in ("add", "add_") and len(node.all_input_nodes) == 2
    return (
        node.op == "call_function"
        and node.target in _ADDS
        and len(node.args) == 2
        and all(isinstance(a, fx.Node) for a in node.args)
        and not node.kwargs
    )


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
    last = [n for n in nodes if n.meta.get("layer") == num_layers - 1]
    if not last:
        raise RewriterError("the model has no decoder layers in its wiring")
    value = last[-1]
    stream: list[tuple[fx.Node, fx.Node]] = []
    while value.meta.get("layer") is not None:
        terms = _terms(value)
        skips = [t for t in terms if all(u is t or ancestors[u] >> position[t] & 1 for u in terms)]
        if len(terms) < 2 or not skips:
            where = _describe(value)
            raise RewriterError(
                f"no residual stream: in layer {value.meta['layer']}, {where} is not the sum of an earlier value and "
                "what was computed from it. Post-norm models have none; there is nothing to rewire."
            )
        stream.append((value, skips[0]))
        value = skips[0]
    value.meta["stream"] = 0
    for index, (node, _) in enumerate(reversed(stream), start=1):
        node.meta["stream"] = index


def _terms(value: fx.Node) -> list[fx.Node]:
    """The summands of an add; an inner sum that nothing else reads is taken apart."""
    if not is_add(value):
        return [value]
    terms: list[fx.Node] = []
    for operand in value.all_input_nodes:
        inner = is_add(operand) and len(operand.users) == 1 and "stream" not in operand.meta
        terms += _terms(operand) if inner else [operand]
    return terms


def _describe(node: fx.Node) -> str:
    return f"the output of {node.target}" if node.op == "call_module" else f"the result of {node.name}"


def stream_values(graph: fx.Graph) -> list[fx.Node]:
    """The values of the stream, in order; empty when the model has none."""
    marked = {n.meta["stream"]: n for n in graph.nodes if "stream" in n.meta}
    return [marked[i] for i in range(len(marked))]


def residual_blocks(program: Program) -> tuple[Block, ...]:
    """The blocks of the stream, in order; empty when the model has no residual stream."""
    stream = stream_values(program.graph)
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    blocks = []
    for index, (skip, add) in enumerate(pairwise(stream)):
        writes = tuple(t for t in _terms(add) if t is not skip)
        branch, reads = _branch(writes, order)
        calls = [n for n in branch if n.op == "call_module"]
        kind, main = _kind(program, calls)
        path = str(main.target).rpartition(".")[0] if kind == "parallel" else str(main.target)
        layer = main.meta["layer"]
        blocks.append(Block(index, layer, kind, path, add, skip, writes, reads, branch))
    return tuple(blocks)


def _branch(writes: tuple[fx.Node, ...], order: Mapping[fx.Node, int]) -> tuple[tuple[fx.Node, ...], tuple[int, ...]]:
    """(nodes between the stream and the writes in graph order, stream indices read)."""
    found: set[fx.Node] = set()
    reads: set[int] = set()
    todo = list(writes)
    while todo:
        node = todo.pop()
        if "stream" in node.meta:
            reads.add(node.meta["stream"])
        elif node not in found and node.op != "placeholder" and node.meta.get("layer") is not None:
            found.add(node)
            todo += node.all_input_nodes
    return tuple(sorted(found, key=order.__getitem__)), tuple(sorted(reads))


def _kind(program: Program, calls: list[fx.Node]) -> tuple[BlockKind, fx.Node]:
    """(kind, call of the main module) of a branch."""
    if not calls:
        raise RewriterError("a block of the residual stream calls no module")
    kinds: dict[BlockKind, fx.Node] = {}
    for node in calls:
        module = program.modules[str(node.target)]
        if attends(module):
            kinds.setdefault("attention", node)
        elif _has_experts(module):
            kinds.setdefault("moe", node)
        elif _has_projection(module):
            kinds.setdefault("mlp", node)
    if "attention" in kinds and len(kinds) > 1:
        return "parallel", kinds["attention"]
    for kind in ("attention", "moe", "mlp"):
        if kind in kinds:
            return kind, kinds[kind]
    return "mixer", calls[-1]


def attends(module: Module) -> bool:
    """Whether an attention node is anywhere inside."""
    return isinstance(module, Body) and (module.attends or any(attends(m) for m in module.modules.values()))


def _has_experts(module: Module) -> bool:
    return isinstance(module, Body) and (
        any(n.target is ops.experts for n in module.graph.nodes) or any(map(_has_experts, module.modules.values()))
    )


def _has_projection(module: Module) -> bool:
    if isinstance(module, Leaf):
        return "Linear" in module.kind or "Conv1D" in module.kind
    return any(map(_has_projection, module.modules.values()))


def computes(module: Module) -> bool:
    """Whether it multiplies by weight matrices, in contrast to norms and glue."""
    return _has_projection(module) or _has_experts(module)

"""Every collective of a program's forward pass: where it is, how many bytes per token, and what hides it.

Convention: the bytes of an all-reduce are its payload, the reduced tensor once; those of an all-gather are the gathered
tensor. What crosses the links depends on the algorithm: a ring sends 2 (P − 1) / P of an all-reduce's payload from each
rank, (P − 1) / P of an all-gather's. A quantized all-reduce sends 2 (P − 1) / P of its payload too: codes and scales of
the reduced tensor once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import fx

from rewriter.common.text_settings import declared_dtype
from rewriter.ir import Module, Parameter, Program, args_of, nodes_inside, ops, reachable
from rewriter.ir.marks import block_of, marks
from rewriter.ir.op_semantics import ends_collective, function_of, kind_of, sends
from rewriter.ir.residual import computes, is_carry
from rewriter.ir.shapes import wiring_shapes
from rewriter.kernels import parse_format, slice_length

Place = Literal["block", "inside a block", "embedding", "head", "other"]


@dataclass(frozen=True)
class Collective:
    """One collective of the forward pass. `layer` and `block` are None outside of the layers.

    `path` is the module whose result it completes, or that it stands in. `bytes_per_token` counts the payload; 0 for a
    result that has no token dimension. `hidden` says that something of `computed_meanwhile` runs between start and
    wait. `format` is that of a quantized message, whose `bytes_per_token` are those of a long one: padding to whole
    blocks is nothing there. A message of less than `min_bytes` travels exact, with `exact_bytes_per_token`.
    """

    kind: Literal["all-reduce", "all-gather"]
    place: Place
    path: str
    layer: int | None
    block: int | None
    width: int
    bytes_per_token: int
    hidden: bool
    exact_bytes_per_token: int
    format: str | None = None
    min_bytes: int = 0


@dataclass(frozen=True)
class QuantizedTraffic:
    """The quantized reductions of a forward pass together, per token.

    They are quantized in calls of `from_tokens` tokens or more (of a rank, over all sequences), and exact in others.
    """

    format: str
    min_bytes: int
    from_tokens: int
    reductions: int
    bytes_per_token: int
    exact_bytes_per_token: int


@dataclass(frozen=True)
class CollectiveTraffic:
    """Collectives summed up, per forward pass and per token."""

    collectives: int
    exposed: int
    hidden: int
    bytes_per_token: int
    exposed_bytes_per_token: int


def model_dtype(program: Program) -> torch.dtype:
    """The model's own dtype, as its config says; fp32 where it says nothing."""
    dtype = getattr(torch, declared_dtype(program.source.config) or "float32", torch.float32)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def model_dtype_bytes(program: Program) -> int:
    """Bytes per element of the model's own dtype."""
    return model_dtype(program).itemsize


def collectives(program: Program) -> tuple[Collective, ...]:
    """The collectives of `program` in the order of its wiring; empty on one rank."""
    if not program.mesh:
        return ()
    size = model_dtype_bytes(program)
    shapes = wiring_shapes(program)
    meanwhile = computed_meanwhile(program.graph, program.modules)
    sent_values: list[Collective] = []
    inside: dict[int, tuple[tuple[int, int], ...]] = {}
    for node in program.graph.nodes:
        layer = marks(node).layer
        index = block_of(node)
        if sends(node):
            gather = function_of(node) == "gather"
            shape = shapes[node] or ()
            width = math.prod(s for s in shape if isinstance(s, int))
            options: dict[str, Any] = dict(node.kwargs)
            format = options.get("format")
            place: Place = "block" if layer is not None else "head" if gather else "embedding"
            kind: Literal["all-reduce", "all-gather"] = "all-gather" if gather else "all-reduce"
            exact = sent = width * size
            if format is not None:  # codes and scales (16 bits, one a block) of a token's elements, rounded up
                parsed = parse_format(format)
                sent = -(-width * (parsed.block * parsed.bits + 16) // (8 * parsed.block))
            hidden, path = bool(meanwhile.get(node)), producer(node)
            sent_values.append(Collective(kind, place, path, layer, index, width, sent, hidden, exact, **options))
        elif node.op == "call_module":
            module = program.modules[str(node.target)]
            if id(module) not in inside:
                inside[id(module)] = tuple(_inside(module, size))
            where: Place = "inside a block" if layer is not None else "other"
            path = str(node.target)
            for width, nbytes in inside[id(module)]:
                sent_values.append(Collective("all-reduce", where, path, layer, index, width, nbytes, False, nbytes))
    return tuple(sent_values)


def split_paths(parameters: Mapping[str, Parameter]) -> set[str]:
    """Paths of the modules that hold a split parameter, each with all paths above."""
    owners = [name.split(".")[:-1] for name, p in parameters.items() if p.ranges is not None]
    return {".".join(parts[:i]) for parts in owners for i in range(1, len(parts) + 1)}


def local_values(graph: fx.Graph, parameters: Mapping[str, Parameter]) -> set[fx.Node]:
    """The values of a wiring that differ by rank."""
    called = {str(node.target) for node in graph.nodes if node.op == "call_module"}
    # of called modules inside each other, the innermost holds a parameter: one may stand for a model's own tensors
    split = (name.split(".")[:-1] for name, parameter in parameters.items() if parameter.ranges is not None)
    around = ([path for path in accumulate(parts, "{}.{}".format) if path in called] for parts in split)
    holders = {paths[-1] for paths in around if paths}
    local: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or ends_collective(node):
            continue
        if marks(node).alike and local.isdisjoint(args_of(node)[0].all_input_nodes):
            continue
        holds = node.op == "call_module" and str(node.target) in holders
        if holds or node.target is ops.copy_to_group or any(n in local for n in node.all_input_nodes):
            local.add(node)
    return local


def quantized(collectives: Iterable[Collective]) -> QuantizedTraffic | None:
    """Totals of the quantized ones among some collectives; None where all are exact."""
    items = [c for c in collectives if c.format is not None]
    if not items:
        return None
    first = items[0]
    return QuantizedTraffic(
        " and ".join(dict.fromkeys(str(c.format) for c in items)),  # layers may differ
        first.min_bytes,
        max(1, *(-(-c.min_bytes // c.exact_bytes_per_token) for c in items)),
        len(items),
        sum(c.bytes_per_token for c in items),
        sum(c.exact_bytes_per_token for c in items),
    )


def sent_bytes(elements: int, ranks: int, format: str) -> int:
    """Bytes that a rank sends to others, and receives, in the quantized all-reduce of a tensor, exactly."""
    parsed = parse_format(format)
    return 2 * (ranks - 1) * parsed.payload_bytes(slice_length(elements, ranks, parsed))


def summary(collectives: Iterable[Collective]) -> CollectiveTraffic:
    """Counts and bytes of some collectives together."""
    items = list(collectives)
    exposed = [c for c in items if not c.hidden]
    return CollectiveTraffic(
        len(items),
        len(exposed),
        len(items) - len(exposed),
        sum(c.bytes_per_token for c in items),
        sum(c.bytes_per_token for c in exposed),
    )


def by_place(collectives: Iterable[Collective]) -> dict[str, CollectiveTraffic]:
    """The same per place: blocks, inside of blocks, embedding, head."""
    items = list(collectives)
    return {place: summary(c for c in items if c.place == place) for place in dict.fromkeys(c.place for c in items)}


def by_layer(collectives: Iterable[Collective]) -> Mapping[int, CollectiveTraffic]:
    """The same per decoder layer."""
    items = list(collectives)
    layers = sorted({c.layer for c in items if c.layer is not None})
    return {layer: summary(c for c in items if c.layer == layer) for layer in layers}


def _inside(module: Module, size: int) -> Iterator[tuple[int, int]]:
    """(width, bytes per token) of each collective inside a module; norm statistics are always fp32."""
    for _, node in nodes_inside(module):
        if sends(node):
            value = node.meta["val"]
            width = math.prod(int(s) for s in value.shape if not isinstance(s, torch.SymInt))
            yield width, width * (value.dtype.itemsize if value.dtype == torch.float32 else size)


def producer(node: fx.Node) -> str:
    """The module that made what is reduced; for a sum of several, the first one's layer or path."""
    sources = reachable(node.all_input_nodes, lambda n: () if n.op == "call_module" else n.all_input_nodes)
    return " + ".join(dict.fromkeys(str(n.target) for n in sources if n.op == "call_module"))


def computed_meanwhile(graph: fx.Graph, modules: Mapping[str, Module]) -> dict[fx.Node, list[int | None]]:
    """By start of a reduction, the block of each module with matrix products that runs before its wait, and of each
    product that mixes streams."""
    pending: dict[fx.Node, list[int | None]] = {}
    ended: dict[fx.Node, list[int | None]] = {}
    for node in graph.nodes:
        if node.target is ops.all_reduce_start:
            pending[node] = []
        elif node.target is ops.all_reduce_wait:
            ended[args_of(node)[0]] = pending.pop(args_of(node)[0])
        elif pending and (
            computes(modules[str(node.target)])
            if node.op == "call_module"
            else is_carry(node) and kind_of(node) == "product"
        ):
            for blocks in pending.values():
                blocks.append(marks(node).carry if is_carry(node) else block_of(node))
    return ended

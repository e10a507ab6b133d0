"""Products with weights that ranks hold parts of: split by outputs (column) where values enter, by inputs (row) where
they leave. A weight is that of a linear layer, or a parameter of the body itself, as of all experts in one batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

from torch import fx

from rewriter.ir import Body, Leaf, Module, args_of, called_module, reachable
from rewriter.ir.labels import is_tensor, value_of
from rewriter.ir.marks import marks
from rewriter.ir.op_semantics import argument, function_of, is_pointwise, kind_of, operator_of
from rewriter.passes.placement.units import Ranges

# per kind of projection: its options for the number of inputs and outputs, and the weight's dimension of outputs
_LAYOUT = {"Linear": ("in_features", "out_features", 0), "Conv1D": ("nx", "nf", 1)}


@dataclass(frozen=True)
class Shard:
    """Split of a parameter: per rank, ranges of the full tensor along `dim`."""

    dim: int
    ranges: tuple[Ranges, ...]
    shared: bool = False


def is_projection(module: Module | None) -> TypeGuard[Leaf]:
    return isinstance(module, Leaf) and module.kind in _LAYOUT


def is_entry(module: Module | None) -> TypeGuard[Leaf]:
    """True if `module` is a projection that is whole or split by outputs."""
    return isinstance(module, Leaf) and module.kind.removeprefix("ColumnParallel") in _LAYOUT


def outputs_layout(entry: Leaf) -> tuple[str, int]:
    """(the option for the number of outputs, the dimension of the weight that they are)."""
    return _LAYOUT[entry.kind.removeprefix("ColumnParallel")][1:]


def inputs_layout(projection: Leaf) -> int:
    """The dimension of the weight that a projection's inputs are."""
    return 1 - _LAYOUT[projection.kind][2]


def is_row_split(module: Module | None, dim: int) -> bool:
    """True if `module` is a projection whose weight has its inputs along `dim`."""
    return isinstance(module, Leaf) and module.kind in _LAYOUT and _LAYOUT[module.kind][2] != dim


def inputs_of(leaf: Leaf) -> int:
    """The number of inputs of a projection that is not split yet."""
    return leaf.parameters["weight"][1 - _LAYOUT[leaf.kind][2]]


def outputs_of(leaf: Leaf) -> int:
    """The number of outputs of a projection that is not split yet."""
    return leaf.parameters["weight"][_LAYOUT[leaf.kind][2]]


def column_parallel(leaf: Leaf, ranges: tuple[Ranges, ...], shared: bool = False) -> tuple[Leaf, dict[str, Shard]]:
    """(a rank's part of a projection, how its parameters are split). `ranges` are of outputs, per rank.

    `shared` says that ranks hold some outputs more than once.
    """
    _, option, dim = _LAYOUT[leaf.kind]
    local = held(ranges)
    options = {**leaf.options, option: local}
    if shared:
        options["shared"] = (leaf.options[option], ranges)
    shards = {"weight": Shard(dim, ranges, shared)}
    shapes = {"weight": resized(leaf.parameters["weight"], dim, local)}
    if "bias" in leaf.parameters:
        shards["bias"] = Shard(0, ranges, shared)
        shapes["bias"] = (local,)
    return Leaf(f"ColumnParallel{leaf.kind}", options, shapes), shards


def row_parallel(leaf: Leaf, ranges: tuple[Ranges, ...]) -> tuple[Leaf, dict[str, Shard]]:
    """(a rank's part of a projection, how its parameters are split). `ranges` are of inputs; the bias stays whole."""
    option, _, outputs = _LAYOUT[leaf.kind]
    dim, local = 1 - outputs, held(ranges)
    shapes = {**leaf.parameters, "weight": resized(leaf.parameters["weight"], dim, local)}
    return Leaf(f"RowParallel{leaf.kind}", {**leaf.options, option: local}, shapes), {"weight": Shard(dim, ranges)}


def held(ranges: tuple[Ranges, ...]) -> int:
    """Number of elements that a rank holds; all hold equally many."""
    return sum(b - a for a, b in ranges[0])


def resized(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    """`shape` with another size of `dim`."""
    return (*shape[:dim], size, *shape[dim + 1 :])


@dataclass(frozen=True)
class Product:
    """x · weight: which dimension of `weight` meets the last one of x, and which becomes the last one of the result."""

    source: fx.Node
    weight: fx.Node
    entry: int
    exit: int
    bias: fx.Node | None = None


def product_of(node: fx.Node) -> Product | None:
    """The product that a node is; None where it is none, or its right side is no parameter of the body."""
    row = operator_of(node)
    if row is None or row.kind != "product" or row.bias == 0:
        return None
    source, weight = (args_of(node)[i] for i in row.factors)
    if weight.op != "get_attr" or source.op == "get_attr":
        return None
    last = value_of(weight).dim() - 1
    if row.transposed:
        return Product(source, weight, last, last - 1, argument(node, "bias"))
    return Product(source, weight, last - 1, last) if last >= 1 else None


@dataclass(frozen=True)
class Chain:
    """`exit(pointwise(entries(x)))`: wiring nodes; every entry's output channel becomes one input channel of `exit`."""

    entries: tuple[fx.Node, ...]
    exit: fx.Node


def chains(graph: fx.Graph, modules: Mapping[str, Module]) -> list[Chain]:
    """The chains of a wiring, in order. Nothing inside one is used elsewhere."""
    result = []
    for node in graph.nodes:
        if marks(node).layer is not None and is_projection(called_module(node, modules)):
            inside, entries = _inputs(node, modules)
            closed = all(set(n.users) <= {*inside, node} for n in (*inside, *entries))
            if entries and closed and not any(_inputs(e, modules)[1] for e in entries):
                result.append(Chain(tuple(entries), node))
    return result


def _inputs(exit: fx.Node, modules: Mapping[str, Module]) -> tuple[list[fx.Node], list[fx.Node]]:
    """(pointwise nodes, projections) that make the input of `exit`; no projections where something else does, too."""
    nodes = reachable(exit.all_input_nodes, lambda n: n.all_input_nodes if _keeps_channels(n, modules) else ())
    inside = [n for n in nodes if _keeps_channels(n, modules)]
    entries = [n for n in nodes if is_projection(called_module(n, modules))]
    return (inside, entries) if len(inside) + len(entries) == len(nodes) else ([], [])


def _keeps_channels(node: fx.Node, modules: Mapping[str, Module]) -> bool:
    if node.op == "call_function":
        return function_of(node) == "mul" or kind_of(node) == "activation"
    module = called_module(node, modules)
    return (
        isinstance(module, Body)
        and not (module.parameters or module.buffers or module.modules)
        and all(is_pointwise(n) for n in module.graph.nodes if n.op == "call_function" and is_tensor(n))
    )

"""State while one body is split over ranks: unit labels, shards, partial sums, and the graph that is edited."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import fx

from rewriter.ir import Body, Module, Program, args_of, copy_graph, ops, parameters_of, placeholders
from rewriter.ir.labels import Labels, is_tensor, tensor_inputs, value_of, varying_dim, varying_dims
from rewriter.ir.op_semantics import aten
from rewriter.passes.placement.projections import Shard, held, resized
from rewriter.passes.placement.units import AXIS, Ranges, Units

# how a value is split: the dimension, and the ranges of it per rank
Split = tuple[int, tuple[Ranges, ...]]


@dataclass
class SplitBody:
    """A rank's part of a body, and how the body's parameters are split, and those of its inputs and results of which
    ranks hold parts, by their place."""

    body: Body
    shards: dict[str, Shard] = field(default_factory=dict)
    inputs: dict[int, Split] = field(default_factory=dict)
    results: dict[int, Split] = field(default_factory=dict)


class PlacementState:
    """One body on its way to a rank's part of it.

    `sharded` are the values of which ranks hold parts, `partial` the values whose sum over ranks is the original value,
    `local` those that every rank computes from its own parameters (a superset of `sharded`). `copied` are the
    `copy_to_group` nodes by the value that they copy.
    """

    def __init__(self, body: Body, units: Units) -> None:
        self.body, self.units, self.ranks = body, units, units.ranks
        self.graph, _ = copy_graph(body.graph)
        self.labels = Labels(self.graph, units.uneven)
        self.modules: dict[str, Module] = dict(body.modules)
        self.shards: dict[str, Shard] = {}
        self.sharded: dict[fx.Node, Split] = {}
        self.partial: set[fx.Node] = set()
        self.local: set[fx.Node] = set()
        self.copied: dict[fx.Node, fx.Node] = {}

    @property
    def results(self) -> list[fx.Node]:
        """The tensors that the body returns."""
        result = args_of(self.graph.output_node())[0]
        return [result] if isinstance(result, fx.Node) else list(result)

    def find_sharded(self) -> None:
        """Fill `sharded` from the labels."""
        self.sharded = {n: s for n in self.graph.nodes if is_tensor(n) and (s := self._split(n)) is not None}

    def _split(self, node: fx.Node) -> Split | None:
        labels = self.labels.of.get(node)
        if labels is None:
            return None
        if len(varying_dims(labels)) > 1:  # units stand along two dimensions, of which one may tell the ranks apart
            owners = self.units.owners(labels)
            if (dim := varying_dim(owners)) is not None:
                return dim, Units.runs_of(_profile(owners, dim), self.ranks)
        dim = varying_dim(labels)
        return None if dim is None else (dim, self.units.ranges(_profile(labels, dim)))

    def shard(self, node: fx.Node) -> Shard:
        """The split of a node's sharded value, in the form of a parameter's."""
        return Shard(*self.sharded[node], shared=self.shared(node))

    def shared(self, node: fx.Node) -> bool:
        """True if several ranks hold the same part of a value."""
        labels = self.labels.of.get(node)
        return labels is not None and self.units.shared(labels.flatten())

    def copies(self, node: fx.Node) -> int | None:
        """Number of ranks that hold each element of a reduction's input; None when that differs."""
        labels = self.labels.of.get(args_of(node)[0])
        return 1 if labels is None else self.units.copies(labels.flatten())

    def copy_to_group(self, user: fx.Node, *values: fx.Node) -> None:
        """Route `values` into `user` through one `copy_to_group` per value, where a gradient reaches it."""
        for value in values:
            if value in self.local or not differentiable(value, self.body):
                continue
            if value not in self.copied:
                self.copied[value] = node = copied_to_group(value)
                for other in list(value.users):
                    if other.target is aten.sym_size.int:  # sizes are the same; printed code then reads one name
                        other.replace_input_with(value, node)
            user.replace_input_with(value, self.copied[value])

    def replace(self, path: str, split: tuple[Module, dict[str, Shard]]) -> None:
        """Put a rank's part of a module at `path`."""
        self.modules[path], shards = split
        self.shards |= {f"{path}.{name}": shard for name, shard in shards.items()}

    def result(self) -> SplitBody:
        """The body as it is now, with local sizes of its parameters."""
        own = self.body.parameters
        split = {name: shard for name, shard in self.shards.items() if name in own}
        shared = {name: (own[name][shard.dim], shard.ranges) for name, shard in split.items() if shard.shared}
        sizes = {name: resized(own[name], shard.dim, held(shard.ranges)) for name, shard in split.items()}
        parameters = {**own, **sizes}
        body = replace(self.body, graph=self.graph, modules=self.modules, parameters=parameters, shared=shared)
        ends = placeholders(self.graph), self.results
        inputs, results = ({i: self.sharded[n] for i, n in enumerate(of) if n in self.sharded} for of in ends)
        return SplitBody(body, self.shards, inputs, results)


def _profile(labels: torch.Tensor, dim: int) -> torch.Tensor:
    """The labels along the one dimension that they vary along."""
    return labels.movedim(dim, 0).reshape(labels.shape[dim], -1)[:, 0]


def copied_to_group(value: fx.Node) -> fx.Node:
    """A new `copy_to_group` of a value, after it; that of an input, after all inputs."""
    with value.graph.inserting_after(placeholders(value.graph)[-1] if value.op == "placeholder" else value):
        node = value.graph.call_function(ops.copy_to_group, (value, AXIS))
    node.meta["val"] = value_of(value)
    return node


def differentiable(node: fx.Node, body: Body) -> bool:
    """True if a gradient can reach `node`: a floating value that depends on a parameter or a differentiated input."""
    value = value_of(node)
    if isinstance(value, torch.Tensor) and not value.dtype.is_floating_point:
        return False
    if node.op == "get_attr":
        return str(node.target) in body.parameters and str(node.target) not in body.stored
    if node.op == "placeholder":
        return node.name not in body.constant_inputs
    return node.op == "call_module" or any(differentiable(n, body) for n in tensor_inputs(node))


def name_of(node: fx.Node) -> str:
    """The operator of a node, as a refusal names it."""
    return getattr(node.target, "__name__", None) or str(node.target)


def alike_inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs of a call that have the shape of the first: values that are split alike, such as a norm's gate."""
    inputs = [n for n in args_of(node) if isinstance(n, fx.Node) and is_tensor(n)]
    return [n for n in inputs if value_of(n).shape == value_of(inputs[0]).shape]


def reads_values(body: Body) -> bool:
    """True if the result of a body depends on the values of its first input, and not only on its dtype and sizes."""
    reached = {placeholders(body.graph)[0]}
    for node in body.graph.nodes:
        sources = node.all_input_nodes if node.op == "call_module" else tensor_inputs(node)
        if node.op.startswith("call") and node.target is not aten.sym_size.int and reached & set(sources):
            reached.add(node)
    return bool(reached & set(body.graph.output_node().all_input_nodes))


def with_constant_inputs(program: Program) -> dict[str, Module]:
    """The modules of `program`, where bodies name the inputs that need no gradient. Alike bodies stay shared."""
    flows: dict[fx.Node, bool] = {}
    done: dict[tuple[int, frozenset[str]], Body] = {}
    modules = dict(program.modules)
    for node in program.graph.nodes:
        if node.op in ("placeholder", "output"):
            flows[node] = False
        elif node.op == "call_module":
            module = program.modules[str(node.target)]
            if not isinstance(module, Body):
                flows[node] = True
                continue
            inputs = zip(placeholders(module.graph), node.args, strict=True)
            constant = frozenset(p.name for p, source in inputs if not flows[source])
            key = (id(module), constant)
            if key not in done:
                done[key] = replace(module, constant_inputs=constant)
            modules[str(node.target)] = done[key]
            flows[node] = _output_flows(done[key])
        else:
            flows[node] = any(flows[n] for n in node.all_input_nodes)
    return modules


def _output_flows(body: Body) -> bool:
    outputs = body.graph.output_node().all_input_nodes
    return next(parameters_of(body), None) is not None or any(differentiable(n, body) for n in outputs)

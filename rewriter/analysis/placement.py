"""How one body is split over ranks: entry projections by output (heads whole), exit projections by input.

The result is a body of local sizes whose output is Partial: the sum over ranks is the original output. Values are
Replicated, Shard(dim) or Partial; a replicated value that enters rank-local computation passes `copy_to_group`, whose
gradient is an all-reduce.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from rewriter import ops
from rewriter.analysis.labels import (
    MOVEMENT,
    REDUCTIONS,
    Labels,
    Unsplittable,
    aten,
    is_pointwise,
    is_tensor,
    reduced_shape,
    tensor_inputs,
    value_of,
    varying_dim,
)
from rewriter.analysis.products import Product, product_of
from rewriter.analysis.projections import Shard, column_parallel, held, is_projection, resized, row_parallel
from rewriter.analysis.units import Ranges, Units
from rewriter.ir import Body, Leaf, Module, args_of, copy_graph
from rewriter.ir.marks import mark

AXIS = "tp"
# operators through which a sum over ranks may be taken later: linear in their first tensor
_LINEAR = frozenset({aten.mul.Tensor, aten.div.Tensor, aten.neg.default, ops.type_as_model, aten.to.dtype, *REDUCTIONS})


@dataclass
class SplitBody:
    body: Body
    shards: dict[str, Shard] = field(default_factory=dict)


def split_body(body: Body, ranks: int) -> SplitBody:
    """`body` for one of `ranks` ranks, with a Partial output. Raises Unsplittable with the reason in words."""
    return _Splitter(body, ranks).run()


class _Splitter:
    def __init__(self, body: Body, ranks: int) -> None:
        self.body, self.ranks = body, ranks
        self.graph, _ = copy_graph(body.graph)
        self.labels = Labels(self.graph)
        self.units = Units(ranks)
        self.shards: dict[str, Shard] = {}
        self.modules: dict[str, Module] = dict(body.modules)
        self.partial: set[fx.Node] = set()
        self.local: set[fx.Node] = set()
        self.entered: dict[fx.Node, fx.Node] = {}

    def run(self) -> SplitBody:
        if self.body.outputs != 1:
            raise Unsplittable("it returns several tensors")
        exits = self._exits()
        self._label_attention()
        self.labels.propagate()
        for node in exits:
            self._label_exit(node)
        self._through_bodies()
        self._rewrite(set(exits))
        output = args_of(self.graph.output_node())[0]
        if output not in self.partial:
            raise Unsplittable("its output is not a sum over heads or channels")
        return SplitBody(self._local_body(), self.shards)

    # --- where the output is made
    # ----------------------------------------------------------------------------------------

    def _exits(self) -> list[fx.Node]:
        """The projections (or experts) whose outputs are summed up to the body's output."""
        exits: list[fx.Node] = []
        todo = [args_of(self.graph.output_node())[0]]
        while todo:
            node = todo.pop()
            if not isinstance(node, fx.Node):
                continue
            if (
                node.op == "call_module" and is_projection(self.body.modules.get(str(node.target)))
            ) or self._is_product(node):
                exits.append(node)
            elif node.target in (aten.add.Tensor, operator.add):
                todo += node.all_input_nodes
            elif node.target in MOVEMENT or node.target in _LINEAR:
                todo += [n for n in tensor_inputs(node) if self._reaches_projection(n)]
            elif node.op == "placeholder":
                raise Unsplittable("its output adds its own input")
            else:
                raise Unsplittable(f"its output is made by {_name(node)}, not by a projection")
        if not exits:
            raise Unsplittable("no projection makes its output")
        return exits

    def _reaches_projection(self, node: fx.Node) -> bool:
        """Whether a projection lies behind `node` by linear operators only (a gate in front of a sum does not)."""
        if node.op == "call_module":
            return is_projection(self.body.modules.get(str(node.target))) and not self._is_gate(node)
        if self._is_product(node):
            return True
        if node.target in MOVEMENT or node.target in _LINEAR or node.target is aten.add.Tensor:
            return any(self._reaches_projection(n) for n in tensor_inputs(node))
        return False

    def _is_product(self, node: fx.Node) -> bool:
        """Whether a node projects by parameters of the body itself."""
        product = product_of(node)
        return node.target is ops.experts or (
            product is not None and str(product.weight.target) in self.body.parameters and not self._is_scale(product)
        )

    @staticmethod
    def _is_scale(product: Product) -> bool:
        return value_of(product.weight).shape[product.exit] == 1

    def _is_gate(self, node: fx.Node) -> bool:
        """A projection to one number per token scales a sum; it is not one of the summands."""
        module = self.body.modules[str(node.target)]
        assert isinstance(module, Leaf)
        return reduced_shape(value_of(node))[-1] == 1

    # --- labels
    # -----------------------------------------------------------------------------------------------------------

    def _label_attention(self) -> None:
        for node in self.graph.nodes:
            if node.target is not ops.attention:
                continue
            q, k, v = args_of(node)[:3]
            heads, kv_heads = reduced_shape(value_of(q))[1], reduced_shape(value_of(k))[1]
            first = self.units.channels(heads, "query heads")
            by_head = torch.arange(first, first + heads)
            self._set_heads(q, by_head)
            self._set_heads(node, by_head)
            if isinstance(sinks := node.kwargs.get("sinks"), fx.Node):
                self.labels.set(sinks, by_head)
            # one key/value head per query head is the same unit: fused projections interleave them
            first_kv = first if kv_heads == heads else self.units.key_value_heads(heads, kv_heads)
            if first_kv is not None:
                for operand in (k, v):
                    self._set_heads(operand, torch.arange(first_kv, first_kv + kv_heads))

    def _set_heads(self, node: fx.Node, heads: torch.Tensor) -> None:
        self.labels.set(node, heads.reshape(1, -1, 1, 1).expand(reduced_shape(value_of(node))))

    def _label_exit(self, node: fx.Node) -> None:
        if node.target is ops.experts:
            return
        source = args_of(node)[0]
        assert isinstance(source, fx.Node)
        if source not in self.labels.of:
            shape = reduced_shape(value_of(source))
            first = self.units.channels(shape[-1], "channels")
            self.labels.set(source, torch.arange(first, first + shape[-1]).expand(shape))
            self.labels.propagate()

    def _through_bodies(self) -> None:
        """Labels inside small bodies (norms) agree on both sides of their call."""
        again = True
        while again:
            again = False
            for node in self.graph.nodes:
                module = self.modules.get(str(node.target)) if node.op == "call_module" else None
                if isinstance(module, Body) or (isinstance(module, Leaf) and module.kind == "LayerNorm"):
                    before = set(self.labels.of)
                    labels = self.labels.get(node)
                    source = args_of(node)[0]
                    if isinstance(module, Body) and not _reads_values(module):
                        continue
                    if labels is None and source in self.labels.of:
                        self.labels.set(node, self.labels.of[source])
                    elif labels is not None:
                        self.labels.set(source, labels)
                    if set(self.labels.of) != before:
                        self.labels.propagate()
                        again = True

    def _ranges(self, node: fx.Node) -> tuple[int, tuple[Ranges, ...]] | None:
        """(dimension, ranges per rank) of a sharded value; None for a replicated one."""
        labels = self.labels.get(node)
        if labels is None:
            return None
        if (apart := self._by_owner(labels)) is not None:
            return apart
        dim = varying_dim(labels)
        if dim is None:
            return None
        profile = labels.movedim(dim, 0).reshape(labels.shape[dim], -1)[:, 0]
        return dim, self.units.ranges(profile)

    def _by_owner(self, labels: torch.Tensor) -> tuple[int, tuple[Ranges, ...]] | None:
        """As `_ranges`, for units that lie along two dimensions of which one tells the ranks apart."""
        if sum(not (labels == labels.narrow(d, 0, 1)).all() for d in range(labels.dim())) < 2:
            return None
        owners = self.units.owners(labels)
        dim = varying_dim(owners)
        if dim is None:
            return None
        profile = owners.movedim(dim, 0).reshape(owners.shape[dim], -1)[:, 0]
        return dim, Units.runs_of(profile, self.ranks)

    def _shared(self, node: fx.Node) -> bool:
        labels = self.labels.get(node)
        return labels is not None and self.units.shared(labels.flatten())

    def _copies(self, node: fx.Node) -> int | None:
        """On how many ranks each element of a reduction's input lies; None when that differs."""
        labels = self.labels.get(args_of(node)[0])
        return 1 if labels is None else self.units.copies(labels.flatten())

    # --- the local graph
    # ------------------------------------------------------------------------------------------------------

    def _rewrite(self, exits: set[fx.Node]) -> None:
        sharded = {n: r for n in self.graph.nodes if is_tensor(n) and (r := self._ranges(n)) is not None}
        self._find_local(sharded)
        for node in list(self.graph.nodes):
            if node in sharded and node.op == "placeholder":
                raise Unsplittable(f"its input {node.name} would be split")
            if node.op == "get_attr" and node in sharded:
                if str(node.target) in self.body.buffers:
                    raise Unsplittable(f"its constant {node.target} would be split")
                self.shards[str(node.target)] = Shard(*sharded[node], shared=self._shared(node))
            elif node.op == "call_module":
                self._call(node, exits, sharded)
            elif (product := product_of(node)) is not None and (
                node in sharded or product.source in sharded or product.source in self.partial
            ):
                self._product(node, product, exits, sharded)
            elif node.op == "call_function":
                self._function(node, sharded)

    def _find_local(self, sharded: Mapping[fx.Node, Any]) -> None:
        """The one key/value head of a fused projection is no shard, but every rank computes it from its own copy."""
        for node in self.graph.nodes:
            through = node.target in MOVEMENT or is_pointwise(node)
            if node in sharded or (through and any(n in self.local for n in tensor_inputs(node))):
                self.local.add(node)

    def _call(self, node: fx.Node, exits: set[fx.Node], sharded: Mapping[fx.Node, Any]) -> None:
        path = str(node.target)
        module = self.modules[path]
        source = args_of(node)[0]
        assert isinstance(source, fx.Node)
        if is_projection(module):
            assert isinstance(module, Leaf)
            if node in exits and source in sharded:
                self._replace(path, row_parallel(module, sharded[source][1]))
                self.partial.add(node)
            elif node in sharded:
                if source in sharded:
                    raise Unsplittable(f"{path} is both an entry and an exit")
                self._replace(path, column_parallel(module, sharded[node][1], self._shared(node)))
                self._enter(node, source)
            elif source in sharded or source in self.partial:
                raise Unsplittable(f"{path} reads split values and its output is not summed")
        elif isinstance(module, Leaf) and module.kind == "LayerNorm" and self._beside_heads(node):
            self.modules[path] = replace(module, options={**module.options, "entered": True})
        elif isinstance(module, Body) and not _reads_values(module):
            if source in sharded:
                self._lend_dtype(node, path, module)
        elif node in sharded or source in sharded:
            if not isinstance(module, Body):
                raise Unsplittable(f"{path} ({getattr(module, 'kind', module)}) normalises over split channels")
            local = split_inner(module, sharded[source], self.units, self.labels.of[source])
            self.modules[path] = local.body
            for name, shard in local.shards.items():
                self.shards[f"{path}.{name}"] = shard
        elif any(n in self.partial for n in node.all_input_nodes):
            raise Unsplittable(f"{path} reads a sum that is not complete")

    def _beside_heads(self, node: fx.Node) -> bool:
        """Whether a module works along the last dimension of values that are split along another."""
        labels = self.labels.get(node)
        return labels is not None and varying_dim(labels) not in (None, labels.dim() - 1)

    def _lend_dtype(self, node: fx.Node, path: str, module: Body) -> None:
        """A rotary embedding that is given a split value, to learn its dtype, is given the body's own input instead."""
        source, whole = args_of(node)[0], next(n for n in self.graph.nodes if n.op == "placeholder")
        asked = next(n for n in module.graph.nodes if n.op == "placeholder").users
        if value_of(whole).dtype != value_of(source).dtype or any(u.target is aten.sym_size.int for u in asked):
            raise Unsplittable(f"{path} asks for the sizes of split heads or channels")
        node.args = (whole, *args_of(node)[1:])

    def _replace(self, path: str, split: tuple[Leaf, dict[str, Shard]]) -> None:
        self.modules[path], shards = split
        self.shards |= {f"{path}.{name}": shard for name, shard in shards.items()}

    def _function(self, node: fx.Node, sharded: Mapping[fx.Node, Any]) -> None:
        inputs = tensor_inputs(node)
        if node.target is ops.experts:
            self._experts(node)
        elif any(n in self.partial for n in inputs):
            self._linear(node, inputs)
        elif node.target is ops.attention:
            if node in sharded:
                for operand in inputs:
                    if operand not in sharded:
                        self._enter(node, operand)
                self._split_bias(node, sharded)
                mark(node, local_q_heads=held(sharded[node][1]))
                if args_of(node)[1] in sharded:
                    mark(node, local_kv_heads=held(sharded[args_of(node)[1]][1]))
        elif node.target in MOVEMENT:
            localize(node, sharded)
        elif node.target in REDUCTIONS:
            reduce_over_ranks(node, sharded, self.ranks, self._copies(node))
        elif any(n in sharded or n in self.local for n in inputs):
            if not is_pointwise(node) and node not in self.local:
                raise Unsplittable(f"{_name(node)} is computed over split heads or channels")
            for operand in inputs:
                if operand not in sharded:
                    self._enter(node, operand)

    def _split_bias(self, node: fx.Node, sharded: Mapping[fx.Node, Any]) -> None:
        """Each rank adds the part of a position bias that is for its own heads."""
        bias = node.kwargs.get("bias")
        if not isinstance(bias, fx.Node) or bias in sharded or value_of(bias).dim() < 3:
            return
        dim = value_of(bias).dim() - 3
        if value_of(bias).shape[dim] != reduced_shape(value_of(node))[1]:
            return  # one for all heads
        with self.graph.inserting_before(node):
            own = self.graph.call_function(ops.own_shard, (bias, AXIS, dim))
        own.meta["val"] = value_of(bias).narrow(dim, 0, value_of(bias).shape[dim] // self.ranks)
        node.kwargs = {**node.kwargs, "bias": own}

    def _linear(self, node: fx.Node, inputs: list[fx.Node]) -> None:
        summands = [n for n in inputs if n in self.partial]
        if node.target in (aten.add.Tensor, operator.add):
            if len(summands) != len(inputs):
                raise Unsplittable(f"{_name(node)} adds a complete value to a sum over ranks")
        elif (
            node.target in _LINEAR
            and len(summands) == 1
            and (node.target is not aten.div.Tensor or args_of(node)[0] in summands)
        ):
            for operand in inputs:
                if operand not in summands:
                    self._enter(node, operand)
        elif node.target not in MOVEMENT:
            raise Unsplittable(f"{_name(node)} is not linear and reads a sum that is not complete")
        self.partial.add(node)

    def _product(
        self, node: fx.Node, product: Product, exits: set[fx.Node], sharded: Mapping[fx.Node, tuple[int, Any]]
    ) -> None:
        """A product with a parameter of the body itself, split as a projection is: by output or by input."""
        name, source = str(product.weight.target), product.source
        if name not in self.body.parameters or source in self.partial:
            raise Unsplittable(f"{_name(node)} with {name} reads a sum that is not complete, or a constant")
        for value in (node, source):
            if value in sharded and sharded[value][0] != value_of(value).dim() - 1:
                raise Unsplittable(f"{_name(node)} with {name} is computed over split heads or channels")
        if node in exits and source in sharded:
            self.shards[name] = Shard(product.entry, sharded[source][1])
            if product.bias is not None:
                self._share(node, product.bias)
            self.partial.add(node)
        elif node in sharded and source not in sharded:
            ranges, shared = sharded[node][1], self._shared(node)
            self.shards[name] = Shard(product.exit, ranges, shared)
            if product.bias is not None:
                self.shards[str(product.bias.target)] = Shard(0, ranges, shared)
            self._enter(node, source)
        else:
            raise Unsplittable(f"{_name(node)} with {name} is both an entry and an exit, or its output is not summed")

    def _share(self, node: fx.Node, bias: fx.Node) -> None:
        """Every rank adds an equal part of a bias to its part of a sum."""
        if bias.op != "get_attr":
            raise Unsplittable(f"the bias of {_name(node)} is no parameter")
        self._enter(node, bias)
        whole = self.entered.get(bias, bias)
        with self.graph.inserting_before(node):
            share = self.graph.call_function(aten.mul.Tensor, (whole, 1.0 / self.ranks))
        share.meta["val"] = value_of(bias)
        node.replace_input_with(whole, share)

    def _experts(self, node: fx.Node) -> None:
        """Every expert is split by channels. A bias of the second projection is shared out: each rank adds its part."""
        x, _, weight, up, down, up_bias, down_bias = (*args_of(node), None, None)[:7]
        transposed, layout = node.kwargs.get("transposed", False), node.kwargs.get("layout", "concatenated")
        size = int(value_of(down).shape[1 if transposed else 2])
        if size % self.ranks:
            raise Unsplittable(f"{size} expert channels do not divide by {self.ranks}")
        local = size // self.ranks
        runs = [(r * local, (r + 1) * local) for r in range(self.ranks)]
        ranges: dict[Any, tuple[Ranges, ...]] = {
            "concatenated": tuple(((a, b), (size + a, size + b)) for a, b in runs),
            "interleaved": tuple(((2 * a, 2 * b),) for a, b in runs),
            "ungated": tuple((run,) for run in runs),
        }
        self.shards[str(up.target)] = Shard(2 if transposed else 1, ranges[layout])
        self.shards[str(down.target)] = Shard(1 if transposed else 2, tuple((run,) for run in runs))
        if up_bias is not None:
            self.shards[str(up_bias.target)] = Shard(1, ranges[layout])
        self._enter(node, x)
        self._enter(node, weight)
        if down_bias is not None:
            self._share(node, down_bias)
        self.partial.add(node)

    def _enter(self, user: fx.Node, value: fx.Node) -> None:
        """Route `value` into `user` through one `copy_to_group` per value."""
        if value in self.local or not differentiable(value, self.body):
            return
        if value not in self.entered:
            with self.graph.inserting_after(insertion_point(value)):
                node = self.graph.call_function(ops.copy_to_group, (value, AXIS))
            node.meta["val"] = value_of(value)
            self.entered[value] = node
            for other in list(value.users):
                if other.target is aten.sym_size.int:  # sizes are the same; printed code then reads one name
                    other.replace_input_with(value, node)
        user.replace_input_with(value, self.entered[value])

    def _local_body(self) -> Body:
        own = self.body.parameters
        shared = {
            name: (own[name][shard.dim], shard.ranges)
            for name, shard in self.shards.items()
            if name in own and shard.shared
        }
        parameters = local_shapes(own, self.shards)
        return replace(self.body, graph=self.graph, modules=self.modules, parameters=parameters, shared=shared)


def _reads_values(body: Body) -> bool:
    """Whether the result of a body depends on the values of its first input, and not only on its dtype and sizes."""
    reached = {next(n for n in body.graph.nodes if n.op == "placeholder")}
    for node in body.graph.nodes:
        sources = node.all_input_nodes if node.op == "call_module" else tensor_inputs(node)
        if node.op.startswith("call") and node.target is not aten.sym_size.int and reached & set(sources):
            reached.add(node)
    return bool(reached & set(body.graph.output_node().all_input_nodes))


def local_shapes(parameters: Mapping[str, tuple[int, ...]], shards: Mapping[str, Shard]) -> dict[str, tuple[int, ...]]:
    result = dict(parameters)
    for name, shape in parameters.items():
        if name in shards:
            shard = shards[name]
            result[name] = resized(shape, shard.dim, held(shard.ranges))
    return result


def split_inner(body: Body, source: tuple[int, tuple[Ranges, ...]], units: Units, labels: torch.Tensor) -> SplitBody:
    """A small body (a norm) whose one input is split; its output is split alike.

    A mean over the split dimension becomes the mean of the ranks' means, by one small all-reduce.
    """
    splitter = _Splitter(body, units.ranks)
    splitter.units = units
    first = next(n for n in splitter.graph.nodes if n.op == "placeholder")
    splitter.labels.set(first, labels)
    splitter.labels.propagate()
    sharded = {n: r for n in splitter.graph.nodes if is_tensor(n) and (r := splitter._ranges(n)) is not None}
    for node in list(splitter.graph.nodes):
        if node.op == "get_attr" and node in sharded:
            splitter.shards[str(node.target)] = Shard(*sharded[node], shared=splitter._shared(node))
        elif node.op == "call_module":
            raise Unsplittable(f"{body.class_name} calls {node.target} on split channels")
        elif node.op == "call_function":
            splitter._function(node, sharded)
    output = args_of(splitter.graph.output_node())[0]
    if output not in sharded:
        raise Unsplittable(f"{body.class_name} mixes split heads or channels")
    return SplitBody(splitter._local_body(), splitter.shards)


def localize(node: fx.Node, sharded: Mapping[fx.Node, tuple[int, tuple[Ranges, ...]]]) -> None:
    """Replace full sizes among the arguments of a movement operator by local ones."""
    args = list(args_of(node))
    if node.target in (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default):
        if node in sharded:
            dim, ranges = sharded[node]
            sizes = list(args[1])
            if isinstance(sizes[dim], int) and sizes[dim] != -1:
                sizes[dim] = held(ranges)
            args[1] = sizes
    elif node.target is aten.slice.Tensor and (source := sharded.get(args_of(node)[0])):
        dim = (args[1] if len(args) > 1 else 0) % value_of(args_of(node)[0]).dim()
        if dim == source[0]:
            args[2:4] = _local_bounds(args, value_of(args_of(node)[0]).shape[dim], source[1])
    elif node.target in (aten.split.Tensor, aten.split_with_sizes.default) and args[0] in sharded:
        dim = (args[2] if len(args) > 2 else 0) % value_of(args[0]).dim()
        if dim == sharded[args[0]][0]:
            pieces = {
                args_of(u)[1]: held(sharded[u][1]) if u in sharded else int(value_of(u).shape[dim]) for u in node.users
            }
            if (
                node.target is aten.split.Tensor
                and len(set(pieces.values())) == 1
                and len(pieces) == len(value_of(node))
            ):
                args[1] = next(iter(pieces.values()))
            elif len(pieces) == len(value_of(node)):
                args[1] = [pieces[i] for i in range(len(pieces))]
                node.target = aten.split_with_sizes.default
            else:
                raise Unsplittable(f"{_name(node)}: not every piece is used")
    node.args = tuple(args)


def _local_bounds(args: list[Any], size: int, ranges: tuple[Ranges, ...]) -> list[int]:
    start = args[2] if len(args) > 2 and args[2] is not None else 0
    end = args[3] if len(args) > 3 and args[3] is not None else size
    if not isinstance(start, int) or not isinstance(end, int):
        raise Unsplittable("a split dimension is sliced at a computed place")
    start, end = (min(x + size if x < 0 else x, size) for x in (start, end))
    bounds = {tuple(sum(max(0, min(b, x) - a) for a, b in r) for x in (start, end)) for r in ranges}
    if len(bounds) != 1:
        raise Unsplittable("ranks would slice a split dimension differently")
    return list(bounds.pop())


def reduce_over_ranks(node: fx.Node, sharded: Mapping[fx.Node, Any], ranks: int, copies: int | None) -> None:
    """A sum or mean over the split dimension, completed by an all-reduce; the result is replicated.

    Each element lies on `copies` ranks (key/value heads may on several), so that a sum meets it that often.
    """
    source = args_of(node)[0]
    assert isinstance(source, fx.Node)
    if source not in sharded:
        return
    dims = {d % value_of(source).dim() for d in args_of(node)[1]}
    if sharded[source][0] not in dims:
        return
    if copies is None:
        raise Unsplittable(f"{_name(node)} reduces over heads of which ranks hold unequal numbers of copies")
    graph, users = node.graph, list(node.users)
    with graph.inserting_after(node):
        total = graph.call_function(ops.all_reduce, (node, AXIS))
    last, factor = total, 1.0 / (ranks if node.target is aten.mean.dim else copies)
    if factor != 1.0:
        with graph.inserting_after(last):
            last = graph.call_function(aten.mul.Tensor, (last, factor))
    for new in (total, last):
        new.meta["val"] = value_of(node)
    for user in users:
        user.replace_input_with(node, last)


def differentiable(node: fx.Node, body: Body) -> bool:
    """Whether a gradient can reach `node`: a floating value that depends on a parameter or a differentiated input."""
    value = value_of(node)
    if isinstance(value, torch.Tensor) and not value.dtype.is_floating_point:
        return False
    if node.op == "get_attr":
        return str(node.target) in body.parameters and str(node.target) not in body.stored
    if node.op == "placeholder":
        return node.name not in body.constant_inputs
    if node.op == "call_module":
        return True
    return any(differentiable(n, body) for n in tensor_inputs(node))


def insertion_point(node: fx.Node) -> fx.Node:
    """The last placeholder for an input, so that placeholders stay together; else the node itself."""
    if node.op != "placeholder":
        return node
    return [n for n in node.graph.nodes if n.op == "placeholder"][-1]


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", None) or str(node.target)

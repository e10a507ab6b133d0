"""Labels: the indivisible unit (a head, a channel) that each part of a tensor belongs to, followed through glue.

A label tensor has the shape of a node's value with dynamic dimensions (batch, length) taken as 1; it holds one unit
number per element, or -1 where the value is the same for all units. Movement operators are run on label tensors
literally; pointwise ones pass labels on. Nothing here knows models.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from rewriter.ir import args_of, ops
from rewriter.ir.op_semantics import (
    argument,
    aten,
    data_of,
    dims_of,
    factors_of,
    is_movement,
    is_pointwise,
    kind_of,
)

# what pairs of real and imaginary parts do to labels, which are whole numbers
_ON_LABELS: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    aten.view_as_complex.default: lambda pairs: pairs.amax(-1),
    aten.view_as_real.default: lambda labels: torch.stack([labels, labels], -1),
}


class Unsplittable(Exception):
    """A body cannot be split; the message says why."""


def dynamic(size: Any) -> bool:
    return isinstance(size, torch.SymInt)


def reduced_shape(value: torch.Tensor) -> tuple[int, ...]:
    return tuple(1 if dynamic(s) else int(s) for s in value.shape)


def value_of(node: fx.Node) -> Any:
    return node.meta.get("val")


def is_tensor(node: fx.Node) -> bool:
    return isinstance(value_of(node), torch.Tensor)


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs whose values flow into the result."""
    return [n for n in data_of(node) if is_tensor(n) or isinstance(value_of(n), (tuple, list))]


class Labels:
    """Unit labels of the nodes of one graph; `set` merges and raises Unsplittable on a contradiction.

    `uneven` says of labels that ranks would hold different numbers of elements with them: a value that is joined of
    such pieces does not label them.
    """

    def __init__(self, graph: fx.Graph, uneven: Callable[[torch.Tensor], bool] = lambda labels: False) -> None:
        self.graph, self.uneven = graph, uneven
        self.of: dict[fx.Node, torch.Tensor] = {}
        self.changed = False

    def set(self, node: fx.Node, labels: torch.Tensor) -> None:
        if not (labels >= 0).any():
            return
        known = self.of.get(node)
        if known is None:
            self.of[node] = labels.clone()
            self.changed = True
            return
        if known.shape != labels.shape or ((known >= 0) & (labels >= 0) & (known != labels)).any():
            raise Unsplittable(f"{node.name} mixes values of different heads or channels")
        merged = torch.maximum(known, labels)
        if not torch.equal(merged, known):
            self.of[node] = merged
            self.changed = True

    def forward(self, node: fx.Node) -> None:
        """Labels of `node` from those of its inputs."""
        if is_movement(node):
            if not is_tensor(node):
                return  # a list of pieces: its getitems look through it
            sources = self._sources(node)
            if any(s in self.of for s in sources):
                self.set(node, self._move(node, lambda s: self.of.get(s)))
        elif is_pointwise(node) and is_tensor(node):
            shape = reduced_shape(value_of(node))
            for source in tensor_inputs(node):
                if source in self.of:
                    self.set(node, self.of[source].expand(shape))
        elif is_reduction_in_place(node):
            if (labels := self.of.get(tensor_inputs(node)[0])) is not None:
                for dim in dims_of(node):
                    labels = common(labels, dim)
                self.set(node, labels)
        elif kind_of(node) == "product":
            left, right = factors_of(node)
            if (labels := self.of.get(right)) is not None and labels.dim() > 2:
                summed = common(labels, -1).transpose(-1, -2)
                if labels.dim() - 1 in varying_dims(summed):
                    self._set_stored(left, summed, -2)
            if (labels := self.of.get(left)) is not None and labels.dim() > 2 and _stored(right):
                alike = common(common(labels, -1), -2)  # products of a batch of parameters, each of one unit's values
                if varying_dims(alike) and labels.dim() == value_of(node).dim():
                    self.set(node, alike.expand(reduced_shape(value_of(node))))
            self._beside(left, right, node)
        elif node.target in (ops.causal_conv, ops.preceded, ops.remember):
            if (labels := self.of.get(args_of(node)[0])) is not None:
                self.set(node, labels)
        elif node.target is aten.conv1d.default:
            if (labels := self.of.get(args_of(node)[0])) is not None:
                self.set(node, by_group(labels, argument(node, "groups"), reduced_shape(value_of(node))[1]))
        elif kind_of(node) == "normalization" and (source := args_of(node)[0]) in self.of:
            labels = self.of[source]
            if max(varying_dims(labels), default=-1) < labels.dim() - len(args_of(node)[1]):
                self.set(node, labels)

    def backward(self, node: fx.Node) -> None:
        """Labels of the inputs of `node` from its own."""
        labels = self.of.get(node)
        if labels is None:
            return
        if node.target is aten.view_as_complex.default:
            source = self._sources(node)[0]
            self.set(source, labels.unsqueeze(-1).expand(reduced_shape(value_of(source))))
        elif is_movement(node):
            found = {source: self.of_source(node, source, labels) for source in self._sources(node)}
            if kind_of(node) != "join" or not any(map(self.uneven, found.values())):
                for source, source_labels in found.items():
                    self.set(source, source_labels)
        elif kind_of(node) == "normalization" or node.target is ops.remember:
            self.set(args_of(node)[0], labels)
        elif node.target is ops.causal_conv:
            x, weight, bias = args_of(node)[:3]
            self.set(x, labels)
            self.set(weight, labels.reshape(-1, 1).expand(reduced_shape(value_of(weight))))
            if bias is not None:
                self.set(bias, labels.reshape(-1))
        elif node.target is ops.preceded:
            self.set(args_of(node)[0], labels)
        elif node.target is aten.conv1d.default:
            x, weight = args_of(node)[:2]
            self.set(x, by_group(labels, argument(node, "groups"), reduced_shape(value_of(x))[1]))
            self.set(weight, labels.reshape(-1, 1, 1).expand(reduced_shape(value_of(weight))))
            if (bias := argument(node, "bias")) is not None:
                self.set(bias, labels.reshape(-1))
        elif kind_of(node) == "product" and labels.dim() > 2:
            summed = dict(zip(factors_of(node), (-1, -2), strict=True))
            for source in tensor_inputs(node):  # what is added to the products has no dimension that is summed over
                if source not in self.of:
                    self._set_stored(source, labels, summed.get(source))
            left, right = factors_of(node)
            self._beside(node, right, left)
        elif is_pointwise(node):
            for source in tensor_inputs(node):
                self.set(source, shrink_to(labels, reduced_shape(value_of(source))))
        elif is_reduction_in_place(node):
            source = tensor_inputs(node)[0]
            self.set(source, labels.expand(reduced_shape(value_of(source))))

    def _beside(self, known: fx.Node, right: fx.Node, other: fx.Node) -> None:
        """Label the left factor of a product, or its result, as the other one: a matrix multiplies every head alike."""
        labels, matrix = self.of.get(known), value_of(right)
        if labels is None or labels.dim() < 3 or not isinstance(matrix, torch.Tensor) or matrix.dim() != 2:
            return
        heads = common(labels, -1)
        if varying_dims(heads):
            self.set(other, heads.expand(reduced_shape(value_of(other))))

    def of_source(self, node: fx.Node, source: fx.Node, labels: torch.Tensor) -> torch.Tensor:
        """Labels of one of the values that a movement operator moves, from those of its result."""
        shape = reduced_shape(value_of(source))
        count = int(torch.tensor(shape).prod())
        index = torch.arange(count).reshape(shape)
        moved = self._move(node, {source: index}.get)
        source_labels = torch.full((count,), -1)
        inside = (moved >= 0) & (labels >= 0)
        places = moved[inside]
        source_labels[places] = labels[inside]
        # one element read as several units
        source_labels[places[source_labels[places] != labels[inside]]] = -1
        return source_labels.reshape(shape)

    def _set_stored(self, source: fx.Node, labels: torch.Tensor, alike: int | None) -> None:
        """Label an input of a batch of products, if it is a batch of parameters or constants, alike along `alike`."""
        shape = reduced_shape(value_of(source))
        if len(shape) == labels.dim() and _stored(source):
            one = [*shape]
            if alike is not None:
                labels, one[alike] = common(labels, alike), 1
            self.set(source, shrink_to(labels, tuple(one)).expand(shape))

    def _sources(self, node: fx.Node) -> list[fx.Node]:
        """Tensors that a movement operator moves; a getitem looks through its chunk or split."""
        if node.target is operator.getitem:
            inner = args_of(node)[0]
            assert isinstance(inner, fx.Node)
            return self._sources(inner) if is_movement(inner) else []
        return [n for n in node.all_input_nodes if is_tensor(n)]

    def _move(self, node: fx.Node, label: Callable[[fx.Node], torch.Tensor | None]) -> torch.Tensor:
        """Run a movement operator on label tensors; -1 where an input has none."""

        def concrete(n: fx.Node) -> Any:
            if not is_tensor(n):
                return 1  # a dynamic size
            known = label(n)
            return torch.full(reduced_shape(value_of(n)), -1) if known is None else known

        if node.target is operator.getitem:
            inner = args_of(node)[0]
            assert isinstance(inner, fx.Node)
            return self._run(inner, concrete)[args_of(node)[1]]
        return self._run(node, concrete)

    def _run(self, node: fx.Node, concrete: Callable[[fx.Node], Any]) -> Any:
        args = fx.map_arg(node.args, concrete)
        kwargs = dict(fx.map_arg(node.kwargs, concrete))
        kwargs.pop("memory_format", None)
        if node.target in _ON_LABELS:
            return _ON_LABELS[node.target](concrete(args_of(node)[0]))
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def propagate(self) -> None:
        """Forward and backward until nothing changes."""
        nodes = [n for n in self.graph.nodes if n.op == "call_function"]
        self.changed = True
        while self.changed:
            self.changed = False
            for node in nodes:
                self.forward(node)
            for node in reversed(nodes):
                self.backward(node)


def is_reduction_in_place(node: fx.Node) -> bool:
    """True if a node is a sum, mean, norm or the like whose result has the dimensions of its input."""
    return (
        kind_of(node) == "reduction" and is_tensor(node) and bool(dims_of(node)) and argument(node, "keepdim") is True
    )


def by_group(labels: torch.Tensor, groups: int, channels: int) -> torch.Tensor:
    """Labels of `channels` channels on one side of a convolution, [1, C, 1], from those on the other: those that all
    channels of a group have in common."""
    return common(labels.reshape(groups, -1), 1).expand(groups, channels // groups).reshape(1, channels, 1)


def _stored(node: fx.Node) -> bool:
    """True for a parameter or constant, moved or not."""
    while is_movement(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node.op == "get_attr"


def shrink_to(labels: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Labels of a broadcast operand: the common label along broadcast dimensions, -1 where there is none."""
    while labels.dim() > len(shape):
        labels = common(labels, 0).squeeze(0)
    for dim, size in enumerate(shape):
        if size == 1 and labels.shape[dim] != 1:
            labels = common(labels, dim)
    return labels


def common(labels: torch.Tensor, dim: int) -> torch.Tensor:
    first = labels.narrow(dim, 0, 1)
    return torch.where((labels == first).all(dim, keepdim=True), first, torch.full_like(first, -1))


def varying_dims(labels: torch.Tensor) -> list[int]:
    """The dimensions along which labels differ."""
    return [d for d in range(labels.dim()) if not (labels == labels.narrow(d, 0, 1)).all()]


def varying_dim(labels: torch.Tensor) -> int | None:
    """The one dimension along which labels differ; None when they do not. Raises Unsplittable for several."""
    dims = varying_dims(labels)
    if len(dims) > 1:
        raise Unsplittable("heads or channels lie along two dimensions at once")
    return dims[0] if dims else None

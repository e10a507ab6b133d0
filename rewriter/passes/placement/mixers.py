"""Recurrent mixers over ranks: value heads or channels in equal runs, key heads and groups where their heads are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from rewriter.ir import args_of, ops
from rewriter.ir.labels import Unsplittable, reduced_shape, tensor_inputs, value_of
from rewriter.ir.marks import mark
from rewriter.ir.op_semantics import argument, aten
from rewriter.passes.placement.placement_state import PlacementState, name_of
from rewriter.passes.placement.projections import held


def label_mixers(state: PlacementState) -> None:
    """Give the inputs and the result of every recurrence the heads or channels that they belong to."""
    for node in state.graph.nodes:
        if (label := _LABELS.get(node.target)) is not None:
            label(state, node)


def place_mixer(state: PlacementState, node: fx.Node) -> None:
    """A convolution or recurrence computes on a rank's channels and heads as it does on all: it names no sizes."""
    inputs = tensor_inputs(node)
    if any(n in state.partial for n in inputs):
        raise Unsplittable(f"{name_of(node)} reads a sum that is not complete")
    if node in state.sharded:
        state.copy_to_group(node, *(n for n in inputs if n not in state.sharded))
        mark(node, local_channels=held(state.sharded[node][1]))
    elif any(n in state.sharded for n in inputs):
        raise Unsplittable(f"{name_of(node)} mixes split heads or channels")


def place_convolution(state: PlacementState, node: fx.Node) -> None:
    """A convolution whose weights are the body's own: each rank has the outputs of its own groups, or, where there is
    one, its own outputs of all inputs."""
    x, inputs = args_of(node)[0], tensor_inputs(node)
    if any(n in state.partial for n in inputs):
        raise Unsplittable(f"{name_of(node)} reads a sum that is not complete")
    if not state.sharded.keys() & {node, *inputs}:
        return
    groups = argument(node, "groups")
    labels = state.labels.of.get(x, torch.tensor([-1])).reshape(-1)
    along = [state.sharded[n][0] == dim for n, dim in ((x, 1), (node, 1), (args_of(node)[1], 0)) if n in state.sharded]
    alike = x not in state.sharded or (labels.reshape(groups, -1) == labels.reshape(groups, -1)[:, :1]).all()
    if node.target is not aten.conv1d.default or node not in state.sharded or not all(along) or not alike:
        raise Unsplittable(f"{name_of(node)} mixes split heads or channels")
    if groups == 1:
        state.copy_to_group(node, x)
    elif x in state.sharded:
        local = groups * held(state.sharded[node][1]) // reduced_shape(value_of(node))[1]
        node.args = (*args_of(node)[:6], local)
    else:
        raise Unsplittable(f"{name_of(node)} has groups of heads or channels that each rank has all of")


def _delta_rule(state: PlacementState, node: fx.Node) -> None:
    q, k, v, g, beta = args_of(node)[:5]
    _label_heads(state, (v, g, beta, node), (), (q, k))


def _state_space(state: PlacementState, node: fx.Node) -> None:
    x, dt, a, b, c, d, dt_bias = args_of(node)[:7]
    _label_heads(state, (x, dt, node), (a, d, dt_bias), (b, c))


def _label_heads(state: PlacementState, by_token: Any, by_head: Any, groups: Any) -> None:
    """Heads along dimension 2 of `by_token`, dimension 0 of `by_head`; groups along dimension 2 of `groups`."""
    heads, count = (reduced_shape(value_of(one[0]))[2] for one in (by_token, groups))
    first = state.units.channels(heads, "recurrent heads")
    units = torch.arange(first, first + heads)
    for node in by_token:
        _set(state, node, units, 2)
    for node in by_head:
        _set(state, node, units, 0)
    first_group = first if count == heads and not state.units.by_head else state.units.key_value_heads(heads, count)
    if first_group is not None:
        for node in groups:
            _set(state, node, torch.arange(first_group, first_group + count), 2)


def _selective_scan(state: PlacementState, node: fx.Node) -> None:
    x, dt, a, _, _, d, z, dt_bias = args_of(node)[:8]
    _label_channels(state, (x, dt, z, node), (a, d, dt_bias), 1)


def _linear_scan(state: PlacementState, node: fx.Node) -> None:
    _label_channels(state, (*args_of(node)[:2], node), (), 2)


def _label_channels(state: PlacementState, by_token: Any, by_channel: Any, dim: int) -> None:
    """Channels along dimension `dim` of `by_token`, dimension 0 of `by_channel`."""
    size = reduced_shape(value_of(by_token[0]))[dim]
    first = state.units.channels(size, "channels of a state")
    units = torch.arange(first, first + size)
    for node in by_token:
        _set(state, node, units, dim)
    for node in by_channel:
        _set(state, node, units, 0)


def _set(state: PlacementState, node: fx.Node | None, units: torch.Tensor, dim: int) -> None:
    if node is not None:
        shape = reduced_shape(value_of(node))
        state.labels.set(node, units.reshape(-1, *[1] * (len(shape) - dim - 1)).expand(shape))


_LABELS: dict[Any, Callable[[PlacementState, fx.Node], None]] = {
    ops.delta_rule: _delta_rule,
    ops.state_space: _state_space,
    ops.selective_scan: _selective_scan,
    ops.linear_scan: _linear_scan,
}

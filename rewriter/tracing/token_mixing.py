"""Whether a body combines tokens other than by attention: a convolution, a recurrence, a sum over the sequence.

Such a body replays exactly on a whole sequence, but token by token it would need a state that no cache of ours holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rewriter.ir import Body, args_of

aten = torch.ops.aten

# Operators that combine or move elements along a dimension, and where in their arguments the dimension stands.
_ALONG: dict[Any, int] = {
    aten.cumsum.default: 1,
    aten.cumprod.default: 1,
    aten.logcumsumexp.default: 1,
    aten.softmax.int: 1,
    aten._softmax.default: 1,
    aten.log_softmax.int: 1,
    aten.flip.default: 1,
    aten.roll.default: 2,
    aten.select.int: 1,
    aten.unbind.int: 1,
    aten.cat.default: 1,
    aten.slice.Tensor: 1,
    aten.narrow.default: 1,
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
    aten.chunk.default: 2,
    aten.unfold.default: 1,
    aten.sort.default: 1,
    aten.diff.default: 2,
    aten.index_select.default: 1,
    aten.gather.default: 1,
    aten.sum.dim_IntList: 1,
    aten.mean.dim: 1,
    aten.amax.default: 1,
    aten.amin.default: 1,
    aten.max.dim: 1,
    aten.min.dim: 1,
    aten.logsumexp.default: 1,
}  # fmt: skip
_DEFAULTS: dict[Any, Any] = {aten.unbind.int: 0, aten.cat.default: 0, aten.slice.Tensor: 0, aten.split.Tensor: 0,
    aten.split_with_sizes.default: 0, aten.chunk.default: 0, aten.sort.default: -1, aten.diff.default: -1}  # fmt: skip
_CONVOLUTIONS = frozenset(
    op
    for name in ("convolution", "conv1d", "conv2d", "conv3d", "_convolution")
    for op in (getattr(getattr(aten, name), o) for o in getattr(aten, name).overloads())
)
_PRODUCTS = {aten.matmul.default, aten.bmm.default, aten.mm.default, aten.baddbmm.default}


def mixing_operator(body: Body) -> str | None:
    """The first operator of `body` that combines several tokens outside of attention; None when there is none."""
    for module in body.modules.values():
        if isinstance(module, Body) and (found := mixing_operator(module)):
            return found
    for node in body.graph.nodes:
        if node.op == "call_function" and _mixes(node):
            return str(node.target)
    return None


def _mixes(node: fx.Node) -> bool:
    first = args_of(node)[0] if node.args else None
    value = _value(first[0] if isinstance(first, (list, tuple)) and first else first)
    if value is None:
        return False
    if node.target in _CONVOLUTIONS:
        return any(_dynamic(size) for size in value.shape[2:])
    if node.target in _PRODUCTS:
        return _dynamic(value.shape[-1])
    if node.target is aten.constant_pad_nd.default:
        amounts = args_of(node)[1]
        pairs = zip(amounts[::2], amounts[1::2], strict=True)
        return any(
            _dynamic(value.shape[-1 - i]) and (_moves(before) or _moves(after))
            for i, (before, after) in enumerate(pairs)
        )
    if node.target in _ALONG:
        place = _ALONG[node.target]
        dims: Any = (
            args_of(node)[place] if len(node.args) > place else node.kwargs.get("dim", _DEFAULTS.get(node.target))
        )
        return any(
            _dynamic(value.shape[d]) for d in (dims if isinstance(dims, (list, tuple)) else [dims]) if d is not None
        )
    return False


def _moves(amount: Any) -> bool:
    return not isinstance(amount, int) or amount != 0


def _dynamic(size: Any) -> bool:
    return isinstance(size, torch.SymInt)


def _value(node: Any) -> torch.Tensor | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None

"""States that recurrent mixers carry from token to token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import fx

from rewriter.ir import args_of, ops
from rewriter.ir.labels import is_tensor, reduced_shape, value_of
from rewriter.ir.marks import marks


@dataclass(frozen=True)
class State:
    """The state that one call keeps per row of a batch, on a rank: `shape`, in fp32 or in the model's dtype.

    Token ids are kept in fp32, which holds them up to 16,777,216.
    """

    shape: tuple[int, ...]
    fp32: bool


def state_of(node: fx.Node) -> State:
    """The state of a call of one of `ops.STATEFUL`: heads or channels first, of which a rank holds its own, or
    tokens, of which each holds all."""
    sizes = [reduced_shape(value_of(n)) if isinstance(n, fx.Node) and is_tensor(n) else () for n in args_of(node)]
    if node.target is ops.pool_blocks:
        size: Any = node.kwargs["size"]
        tokens = 2 * size - 1 if node.kwargs.get("overlap") else size - 1
        return State((tokens, sizes[0][2] * (2 if sizes[1] else 1)), fp32=False)
    if node.target is ops.preceded:
        before: Any = node.kwargs["count"]
        count, *rest = sizes[0][1], int(before)
    else:
        count, *rest = _SHAPES[node.target](sizes)
    local = marks(node).local_channels
    floating = value_of(args_of(node)[0]).dtype.is_floating_point
    fp32 = node.target not in (ops.causal_conv, ops.preceded) or not floating
    return State((count if local is None else local, *rest), fp32)


# by operator, the shape of its whole state from those of its arguments
_SHAPES: Mapping[Any, Callable[[list[tuple[int, ...]]], tuple[int, ...]]] = MappingProxyType(
    {
        ops.causal_conv: lambda sizes: (sizes[1][0], sizes[1][1] - 1),
        ops.delta_rule: lambda sizes: (sizes[2][2], sizes[1][3], sizes[2][3]),
        ops.state_space: lambda sizes: (sizes[0][2], sizes[0][3], sizes[3][3]),
        ops.selective_scan: lambda sizes: sizes[2],
        ops.linear_scan: lambda sizes: (sizes[0][2],),
    }
)

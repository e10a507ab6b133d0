"""Recurrences and convolutions over tokens as kernels: by arithmetic and bytes, since no public table has them.

A prompt is computed in chunks of 64 tokens by products (flash-linear-attention, mamba_ssm), one new token by reading
and writing the state once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from rewriter.ir import ops
from rewriter.ir.states import state_of
from rewriter.predict.kernel_cost import Kernel
from rewriter.predict.workload import ForwardPass

CHUNK = 64


def recurrence_items(node: fx.Node, tensors: Sequence[Tensor], out: Tensor, given: ForwardPass) -> list[Kernel]:
    """The kernels of a call of one of `ops.RECURRENT` on a rank's `tensors`, which gives `out`; batch first."""
    batch, state = out.shape[0], state_of(node)
    held = batch * math.prod(state.shape) * (4 if state.fp32 else out.element_size())
    nbytes = float(sum(t.nbytes for t in tensors) + out.nbytes)
    name: str = getattr(node.target, "__name__", "recurrence")
    tokens = tensors[0].shape[2 if node.target in _CHANNELS_FIRST else 1]
    if given.is_decode and tokens == 1:
        return [Kernel(name, "glue", nbytes + 2.0 * held)]
    chunks = -(-tokens // CHUNK)
    target: Any = node.target
    shapes: Any = {ops.delta_rule: _delta_rule, ops.state_space: _state_space}.get(target)
    if shapes is None:  # element by element: states of a chunk stay in registers
        return [Kernel(name, "glue", nbytes + 2.0 * held)]
    heads, rows, columns = state.shape
    moved = 2.0 * held * chunks  # each chunk's first state is written and read again
    return [
        Kernel(name, "product", (nbytes + moved) * share, flops, 0, batch * heads * chunks, *size)
        for size, flops, share in shapes(rows, columns, batch * heads * chunks)
    ]


_CHANNELS_FIRST = frozenset({ops.causal_conv, ops.preceded, ops.selective_scan})


def _products(sizes: Sequence[tuple[int, int, int]], batches: int) -> list[tuple[tuple[int, int, int], float, float]]:
    """Per product (rows, columns, depth): its size, its arithmetic in all, its share of the bytes."""
    return [(size, 2.0 * batches * size[0] * size[1] * size[2], 1.0 / len(sizes)) for size in sizes]


def _delta_rule(keys: int, values: int, batches: int) -> Any:
    """Of a chunk: k kᵀ and q kᵀ; the inverse of the first times k and v; what the state says of k and q; the chunk's
    values; the new state (arXiv 2412.06464, section 3.3)."""
    c = CHUNK
    sizes = [(c, c, keys), (c, c, keys), (c, keys + values, c), (c, values, keys), (c, values, keys), (c, values, c),
             (keys, values, c)]  # fmt: skip
    return _products(sizes, batches)


def _state_space(size: int, states: int, batches: int) -> Any:
    """Of a chunk: C Bᵀ; that times x; the chunk's state; what the earlier state gives (arXiv 2405.21060, section 6)."""
    c = CHUNK
    return _products([(c, c, states), (c, size, c), (size, states, c), (c, size, states)], batches)

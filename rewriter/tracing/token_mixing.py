"""Bodies that combine tokens by plain operators, outside of attention and of the operators of recurrent mixers."""

from __future__ import annotations

import torch
from torch import fx

from rewriter.ir import Body, args_of
from rewriter.ir.labels import dynamic, value_of
from rewriter.ir.op_semantics import dims_of, operator_of

# kinds of operators that combine or move elements along the dimensions that they name
_ALONG = ("shift", "piece", "join", "scan", "reduction", "lookup", "difference")


def mixing_operator(body: Body) -> str | None:
    """The first operator of `body` that combines several tokens outside of attention; None when there is none."""
    for module in body.modules.values():
        if isinstance(module, Body) and (mixing := mixing_operator(module)):
            return mixing
    for node in body.graph.nodes:
        if node.op == "call_function" and _mixes(node):
            return str(node.target)
    return None


def _mixes(node: fx.Node) -> bool:
    row = operator_of(node)
    if row is None or not node.args:
        return False
    first = args_of(node)[row.factors[0]] if row.kind == "product" else args_of(node)[0]
    first = first[0] if isinstance(first, (list, tuple)) and first else first
    value = value_of(first) if isinstance(first, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return False
    if row.kind == "convolution":
        return any(map(dynamic, value.shape[2:]))
    if row.kind == "product":
        return dynamic(value.shape[-1])
    if row.kind == "pad":
        amounts = args_of(node)[1]
        moved = [before != 0 or after != 0 for before, after in zip(amounts[::2], amounts[1::2], strict=True)]
        return any(dynamic(value.shape[-1 - i]) and moves for i, moves in enumerate(moved))
    return row.kind in _ALONG and any(dynamic(value.shape[dim]) for dim in dims_of(node))

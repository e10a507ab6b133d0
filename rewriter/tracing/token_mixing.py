"""Bodies that combine tokens by plain operators, outside of attention and of the operators of recurrent mixers."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rewriter.ir import Body, Leaf, args_of
from rewriter.ir.labels import dynamic, value_of
from rewriter.ir.op_semantics import argument, aten, dims_of, operator_of

# kinds of operators that combine or move elements along the dimensions that they name
_ALONG = ("shift", "piece", "join", "scan", "reduction", "lookup", "difference")


def mixing_operator(body: Body) -> str | None:
    """The first operator of `body` that combines several tokens outside of attention; None when there is none."""
    for module in body.modules.values():
        if isinstance(module, Body) and (mixing := mixing_operator(module)):
            return mixing
    for node in body.graph.nodes:
        mixes = node.op == "call_function" and _mixes(node)
        if mixes or (node.op == "call_module" and _is_called_on_more(body, node)):
            return str(node.target)
    return None


def _is_called_on_more(body: Body, node: fx.Node) -> bool:
    """True if a module, but a leaf, is called on tokens behind earlier ones: it was traced with their number."""
    sizes = [s for n in node.all_input_nodes for s in getattr(value_of(n), "shape", ())]
    more = any((known := tokens_beyond(size)) is not None and known[1] != 0 for size in sizes)
    return more and not isinstance(body.modules[str(node.target)], Leaf)


def tokens_beyond(size: Any) -> tuple[str, int] | None:
    """(its symbol, n) of a dynamic size that is n more than a number of rows or tokens; None for another size."""
    if not dynamic(size):
        return None
    more, symbol = size.node.expr.as_coeff_Add()
    return (str(symbol), int(more)) if symbol.is_Symbol else None


def _is_window(node: fx.Node, value: torch.Tensor) -> bool:
    """True for a piece, or a convolution without padding, of tokens behind earlier ones (`ops.preceded`) that leaves as
    many as the call has, or more: each result then is of a window that ends at its token."""
    dim = argument(node, "dim") % value.dim() if node.target is aten.slice.Tensor else 2
    whole, left = (tokens_beyond(v.shape[dim]) for v in (value, value_of(node)))
    unpadded = node.target is aten.slice.Tensor or not any(argument(node, "padding"))
    return whole is not None and left is not None and whole[0] == left[0] and 0 <= left[1] <= whole[1] and unpadded


def _mixes(node: fx.Node) -> bool:
    row = operator_of(node)
    if row is None or not node.args:
        return False
    first = args_of(node)[row.factors[0]] if row.kind == "product" else args_of(node)[0]
    first = first[0] if isinstance(first, (list, tuple)) and first else first
    value = value_of(first) if isinstance(first, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return False
    if node.target in (aten.slice.Tensor, aten.conv1d.default) and _is_window(node, value):
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

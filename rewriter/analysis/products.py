"""Products with a parameter that a body holds itself, as all experts in one batched product."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from rewriter.analysis.labels import aten, value_of
from rewriter.ir import args_of


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
    if node.target not in (aten.bmm.default, aten.matmul.default, aten.mm.default, aten.linear.default):
        return None
    source, weight = args_of(node)[:2]
    if weight.op != "get_attr" or source.op == "get_attr":
        return None
    last = value_of(weight).dim() - 1
    if node.target is aten.linear.default:
        return Product(source, weight, 1, 0, args_of(node)[2] if len(node.args) > 2 else None)
    return Product(source, weight, last - 1, last) if last >= 1 else None

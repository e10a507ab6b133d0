"""Products with a parameter that a body holds itself, as all experts in one batched product."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from rewriter.analysis.labels import value_of
from rewriter.analysis.op_semantics import argument, operator_of
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
    row = operator_of(node)
    if row is None or row.kind != "product" or row.bias == 0:
        return None
    source, weight = (args_of(node)[i] for i in row.factors)
    if weight.op != "get_attr" or source.op == "get_attr":
        return None
    last = value_of(weight).dim() - 1
    if row.transposed:
        return Product(source, weight, last, last - 1, argument(node, "bias"))
    return Product(source, weight, last - 1, last) if last >= 1 else None

"""All-reduces whose results are added become one."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from rewriter import ops
from rewriter.analysis.residual import is_add
from rewriter.common.errors import RewriterError
from rewriter.ir import Program, args_of, drop_dead_nodes
from rewriter.ir.marks import Marks, in_stream, marks, set_marks
from rewriter.passes.base import Effect, Pass, Scope, record

_PRODUCTS = (operator.mul, torch.mul, torch.ops.aten.mul.Tensor, torch.ops.aten.mul.Scalar)


@dataclass(frozen=True)
class MergeReductions(Pass):
    """AR(a) + AR(b) → AR(a + b), also where something else is added in between and where sums are scaled by numbers:
    x + s · AR(a) + t · AR(b) → x + AR(s · a + t · b). For parallel blocks: exact up to the order of the sum.

    Only sums that are used nowhere else. A model without such a pair is left as it is.
    """

    name: ClassVar[str] = "merge_reductions"
    effect: ClassVar[Effect] = "exact"
    scope: ClassVar[Scope] = "runtime"
    makes_partials: ClassVar[bool] = True

    def apply(self, program: Program) -> Program:
        graph, _ = program.edit()
        merged = sum(_merge(node) for node in reversed(list(graph.nodes)) if is_add(node))
        drop_dead_nodes(graph)
        summary = (
            f"{merged} pairs of all-reduces merged" if merged else "no pair of all-reduces is added: nothing to merge"
        )
        return record(program, self, summary, fired=merged > 0, graph=graph)


def _merge(root: fx.Node) -> int:
    """Merge the reductions among the summands of `root`; returns how many are saved."""
    if not root.users or any(_is_inner(root, user) for user in root.users):
        return 0  # dead, or a summand of a larger sum, which takes it apart
    terms = _terms(root)
    known = [(term, found) for term in terms if (found := _reduction(term)) is not None]
    # those that travel alike: over the axis of the first, in its format
    reductions = [term for term, found in known if _wire(found) == _wire(known[0][1])]
    if len(reductions) < 2:
        return 0
    (axis,), travel = _wire(known[0][1])
    graph, others = root.graph, [term for term in terms if term not in reductions]

    def new(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        with graph.inserting_before(root):
            node = graph.call_function(target, args, kwargs)
        set_marks(node, Marks(layer=marks(reductions[0]).layer, block=marks(reductions[0]).block))
        return node

    def total(summands: list[fx.Node]) -> fx.Node:
        value = summands[0]
        for summand in summands[1:]:
            value = new(root.target if root.op == "call_function" else operator.add, (value, summand))
        return value

    partial = total([_unreduced(term, new) for term in reductions])
    reduced = new(ops.all_reduce, (partial, axis), travel)
    if others:
        root.args = (total(others), reduced)
    elif in_stream(root):
        raise RewriterError(f"merge_reductions: {root.name} adds reductions to nothing")
    else:
        root.replace_all_uses_with(reduced)
    return len(reductions) - 1


def _is_inner(node: fx.Node, user: fx.Node) -> bool:
    return is_add(user) and len(node.users) == 1 and not in_stream(node)


def _terms(root: fx.Node) -> list[fx.Node]:
    """The summands of a sum, inner sums that nothing else reads taken apart."""
    terms: list[fx.Node] = []
    for operand in args_of(root):
        terms += _terms(operand) if is_add(operand) and _is_inner(operand, root) else [operand]
    return terms


def _wire(reduction: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a sum travels: its mesh axis, and its format where it is quantized."""
    return reduction.args[1:], dict(reduction.kwargs)


def _reduction(term: fx.Node) -> fx.Node | None:
    """The all-reduce of which `term` is a multiple, when nothing else reads either."""
    if len(term.users) != 1:
        return None
    if term.target is ops.all_reduce:
        return term
    scaled = _scaled(term)
    return None if scaled is None else _reduction(scaled)


def _scaled(node: fx.Node) -> fx.Node | None:
    """What `node` multiplies by a number."""
    if node.op == "call_function" and node.target in _PRODUCTS and len(node.args) == 2 and not node.kwargs:
        tensors = [a for a in node.args if isinstance(a, fx.Node)]
        numbers = [a for a in node.args if isinstance(a, (int, float))]
        if len(tensors) == len(numbers) == 1:
            return tensors[0]
    return None


def _unreduced(term: fx.Node, new: Any) -> fx.Node:
    """`term` with its all-reduce left out: the same multiple of the partial."""
    if term.target is ops.all_reduce:
        partial: fx.Node = args_of(term)[0]
        return partial
    inner = _scaled(term)
    assert inner is not None
    source = _unreduced(inner, new)
    scaled: fx.Node = new(term.target, tuple(source if a is inner else a for a in term.args))
    return scaled

"""All-reduces whose results are added become one."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from rewriter.common.errors import RewriterError
from rewriter.ir import Program, drop_dead_nodes, ops
from rewriter.ir.marks import in_stream, marks, new_call
from rewriter.ir.op_semantics import function_of
from rewriter.ir.residual import is_add, is_inner, terms_of
from rewriter.passes.base import Effect, Pass, Scope, record


@dataclass(frozen=True)
class MergeReductions(Pass):
    """AR(a) + AR(b) → AR(a + b), also where something else is added in between and where sums are scaled by numbers:
    x + s · AR(a) + t · AR(b) → x + AR(s · a + t · b). For parallel blocks: exact up to the order of the sum.

    Only sums that are used nowhere else. A model without such a pair is left as it is.
    """

    name: ClassVar[str] = "merge_reductions"
    effect: ClassVar[Effect] = "exact"
    routine: ClassVar[bool] = True
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
    if not root.users or (is_inner(root) and is_add(next(iter(root.users)))):
        return 0  # dead, or a summand of a larger sum, which takes it apart
    terms = terms_of(root)
    known = [(term, reduction) for term in terms if (reduction := _reduction(term)) is not None]
    # those that travel alike: over the axis of the first, in its format
    reductions = [term for term, reduction in known if _wire(reduction) == _wire(known[0][1])]
    if len(reductions) < 2:
        return 0
    (axis,), travel = _wire(known[0][1])
    graph, others = root.graph, [term for term in terms if term not in reductions]

    def new(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with graph.inserting_before(root):
            return new_call(graph, marks(reductions[0]).only("layer", "block"), target, *args, **kwargs)

    def total(summands: list[fx.Node]) -> fx.Node:
        value = summands[0]
        for summand in summands[1:]:
            value = new(root.target if root.op == "call_function" else operator.add, value, summand)
        return value

    partial = total([_unreduced(term, new) for term in reductions])
    reduced = new(ops.all_reduce, partial, axis, **travel)
    if others:
        root.args = (total(others), reduced)
    elif in_stream(root):
        raise RewriterError(f"merge_reductions: {root.name} adds reductions to nothing")
    else:
        root.replace_all_uses_with(reduced)
    return len(reductions) - 1


def _wire(reduction: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The mesh axis of a sum, and its format where it is quantized."""
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
    """The value that `node` multiplies by a number."""
    scales = node.op == "call_function" and function_of(node) == "mul" and len(node.args) == 2 and not node.kwargs
    numbers = [a for a in node.args if isinstance(a, (int, float))]
    return node.all_input_nodes[0] if scales and len(numbers) == 1 else None


def _unreduced(term: fx.Node, new: Any) -> fx.Node:
    """`term` with its all-reduce left out: the same multiple of the partial."""
    if term.target is ops.all_reduce:
        return term.all_input_nodes[0]
    inner = _scaled(term)
    assert inner is not None
    source = _unreduced(inner, new)
    scaled: fx.Node = new(term.target, *(source if a is inner else a for a in term.args))
    return scaled

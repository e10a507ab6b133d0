"""Tensors of an adapted checkpoint that are not the source's: norm weights of every rank, one after the other."""

from __future__ import annotations

from rewriter.errors import RewriterError
from rewriter.expressions import Expression, Tensor
from rewriter.program import Program


def changed_tensors(program: Program) -> dict[str, Expression]:
    """By name on disk, what a program that is bound to its ranks stores instead of the source's tensor.

    Raises RewriterError where a changed parameter is not a single tensor of the checkpoint.
    """
    origin = program.origin or program
    changed: dict[str, Expression] = {}
    for name, spec in program.parameters.items():
        before = origin.parameters[name].expression if name in origin.parameters else None
        if spec.expression is None or spec.expression == before:
            continue
        if not isinstance(before, Tensor):
            raise RewriterError(f"{name}: its weights per rank cannot be stored, since on disk it is {before}")
        changed[before.name] = spec.expression
    return changed

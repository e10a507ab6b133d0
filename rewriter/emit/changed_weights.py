"""Tensors of an adapted checkpoint that are not the source's: in another order, or norm weights of every rank."""

from __future__ import annotations

from rewriter.common.errors import RewriterError
from rewriter.ir import Program
from rewriter.weights.expressions import Concat, Expression, Shapes, Stack, Take, Tensor, Transpose, is_dequantized


def changed_tensors(program: Program, shapes: Shapes) -> dict[str, Expression]:
    """By name on disk, what the adapted checkpoint of `program` stores instead of the source's tensor.

    `shapes` are those of the source's tensors. Raises RewriterError where a changed parameter is made of several
    tensors of the checkpoint, and not by putting each of them in another order.
    """
    origin = program.origin or program
    changed: dict[str, Expression] = {}
    for name, spec in program.parameters.items():
        before = origin.parameters[name].expression if name in origin.parameters else None
        if spec.expression is None or spec.expression == before or before is None:
            continue
        found = (
            {before.name: spec.expression} if isinstance(before, Tensor) else _inside(before, spec.expression, shapes)
        )
        if found is None and is_dequantized(before):
            raise RewriterError(
                f"{name}: the recipe changes its weights, which are stored quantized, as {before}. Write them "
                "dequantized with --dequantize"
            )
        if found is None:
            raise RewriterError(
                f"{name}: its weights cannot be stored as {spec.expression}, since on disk it is {before}"
            )
        changed |= {tensor: expression for tensor, expression in found.items() if expression != Tensor(tensor)}
    return changed


def untied_tensors(changed: dict[str, Expression]) -> list[str]:
    """Of the changed tensors, sorted, those that hold weights of every rank, one after the other."""
    return sorted(name for name, expression in changed.items() if isinstance(expression, Concat))


def _inside(before: Expression, after: Expression, shapes: Shapes) -> dict[str, Expression] | None:
    """By tensor that `before` reads, what `after` reads in its place; None where they differ by more than orders."""
    after = lowered(after, shapes)
    if isinstance(before, Tensor):
        moved = isinstance(after, Take) and after.source == before
        return {before.name: after} if moved or after == before else None
    pairs: list[tuple[Expression, Expression]]
    if isinstance(before, (Concat, Stack)) and isinstance(after, (Concat, Stack)):
        alike = (type(before), before.dim, len(before.parts)) == (type(after), after.dim, len(after.parts))
        pairs = list(zip(before.parts, after.parts, strict=True)) if alike else []
    elif isinstance(before, Transpose) and isinstance(after, Transpose):
        alike = (before.dim0, before.dim1) == (after.dim0, after.dim1)
        pairs = [(before.source, after.source)]
    else:
        return None
    found: dict[str, Expression] = {}
    for part, other in pairs if alike else ():
        inside = _inside(part, other, shapes)
        if inside is None or any(found.get(name, expression) != expression for name, expression in inside.items()):
            return None
        found |= inside
    return found if alike else None


def lowered(expression: Expression, shapes: Shapes) -> Expression:
    """The same, where the outermost `Take` is one of the parts instead, if no place crosses from part to part."""
    if not isinstance(expression, Take):
        return expression
    source, dim, index = lowered(expression.source, shapes), expression.dim, expression.index
    if isinstance(source, Take) and source.dim == dim:
        return lowered(Take(source.source, dim, tuple(source.index[place] for place in index)), shapes)
    if isinstance(source, Transpose):
        inner = {source.dim0: source.dim1, source.dim1: source.dim0}.get(dim, dim)
        return Transpose(Take(source.source, inner, index), source.dim0, source.dim1)
    if isinstance(source, Stack) and source.dim != dim:
        return Stack(tuple(Take(part, dim - (source.dim < dim), index) for part in source.parts), source.dim)
    if isinstance(source, Concat) and source.dim != dim:
        return Concat(tuple(Take(part, dim, index) for part in source.parts), source.dim)
    if isinstance(source, Concat):
        begin, parts = 0, []
        for part in source.parts:
            end = begin + part.shape(shapes)[dim]
            own = tuple(place - begin for place in index[begin:end])
            if sorted(own) != list(range(end - begin)):
                return expression
            parts.append(Take(part, dim, own))
            begin = end
        return Concat(tuple(parts), dim)
    return expression

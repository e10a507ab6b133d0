"""What each rank holds, as ranges of the adapted checkpoint's tensors instead of the source's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rewriter.common.errors import RewriterError
from rewriter.common.expressions import (
    Concat,
    Dequantized,
    Expression,
    Reference,
    Shapes,
    Slice,
    Stack,
    Take,
    Tensor,
    Transpose,
)
from rewriter.emit.changed_weights import lowered
from rewriter.ir import Program


def weight_references(program: Program, changed: Mapping[str, Expression], shapes: Shapes) -> dict[str, Reference]:
    """By parameter of `program`, how ranks make it from the adapted checkpoint.

    `changed` are the tensors that the adapted checkpoint stores in place of the source's, as expressions over the
    source's, whose `shapes` are given. Raises RewriterError for a parameter without weights, or one that needs
    elements that the adapted checkpoint lacks.
    """
    stored = {expression: Tensor(name) for name, expression in changed.items()}
    found = {}
    for name, spec in program.parameters.items():
        if spec.expression is None:
            raise RewriterError("this program was traced from a config: it has no weights to read")
        expression = _adapted(spec.expression, changed, stored, shapes) if changed else spec.expression
        found[name] = Reference(expression, spec.dim, spec.ranges)
    return found


def _adapted(
    expression: Expression, changed: Mapping[str, Expression], stored: Mapping[Expression, Tensor], shapes: Shapes
) -> Expression:
    """`expression`, over the source's tensors, over those of the adapted checkpoint."""
    if expression in stored:
        return stored[expression]
    if isinstance(expression, Take) and (inside := lowered(expression, shapes)) != expression:
        return _adapted(inside, changed, stored, shapes)
    match expression:
        case Tensor(name):
            return _original(changed[name], Tensor(name), shapes) if name in changed else expression
        case Dequantized():  # quantized weights are not changed
            return expression
        case Concat(parts) | Stack(parts):
            return replace(expression, parts=tuple(_adapted(part, changed, stored, shapes) for part in parts))
        case Take(source, dim, index):
            return _take(_adapted(source, changed, stored, shapes), dim, index)
        case Slice(source) | Transpose(source):
            return replace(expression, source=_adapted(source, changed, stored, shapes))


def _original(change: Expression, tensor: Tensor, shapes: Shapes) -> Expression:
    """The source's tensor, given that the adapted checkpoint stores `change` under its name."""
    if isinstance(change, Take):  # other elements' places: the inverse puts them back
        size = change.source.shape(shapes)[change.dim]
        places = {place: stands for stands, place in enumerate(change.index)}
        if len(places) == size:
            inverse = tuple(places[place] for place in range(size))
            if change.source == tensor:
                return Take(tensor, change.dim, inverse)
    if isinstance(change, Concat) and tensor in change.parts:
        before = change.parts[: change.parts.index(tensor)]
        start = sum(part.shape(shapes)[change.dim] for part in before)
        return Slice(tensor, change.dim, ((start, start + tensor.shape(shapes)[change.dim]),))
    raise RewriterError(
        f"{tensor}: the adapted checkpoint stores {change}, from which the ranks cannot make what they hold. Write the "
        "ranks' weights beside it with --materialize"
    )


def _take(source: Expression, dim: int, index: tuple[int, ...]) -> Expression:
    """`Take`, where one of it suffices for two."""
    if isinstance(source, Take) and source.dim == dim:
        index = tuple(source.index[place] for place in index)
        source = source.source
        if index == tuple(range(len(index))) and isinstance(source, Tensor):
            return source
    return Take(source, dim, index)

"""Ranges of tensors that are stored quantized, as ranges of what is stored: only those are read and dequantized."""

from __future__ import annotations

from dataclasses import replace
from math import lcm

from rewriter.common.expressions import (
    Concat,
    Dequantized,
    Expression,
    Shapes,
    Slice,
    Stack,
    Take,
    Tensor,
    Transpose,
)


def is_dequantized(expression: Expression) -> bool:
    """Whether elements of the result are computed from codes and scales."""
    match expression:
        case Tensor():
            return False
        case Dequantized():
            return True
        case Concat(parts) | Stack(parts):
            return any(map(is_dequantized, parts))
        case Slice(source) | Take(source) | Transpose(source):
            return is_dequantized(source)


def narrowed(expression: Expression, shapes: Shapes) -> Expression:
    """The same tensor, where every `Slice` of a dequantized one is one of its codes and scales, as far as those can be
    cut."""
    match expression:
        case Tensor() | Dequantized():
            return expression
        case Concat(parts) | Stack(parts):
            return replace(expression, parts=tuple(narrowed(part, shapes) for part in parts))
        case Transpose(source) | Take(source):
            return replace(expression, source=narrowed(source, shapes))
        case Slice(source, dim, ranges):
            if not is_dequantized(source):
                return expression
            source = narrowed(source, shapes)
            parts = tuple(_range(source, dim, start, stop, shapes) for start, stop in ranges)
            return parts[0] if len(parts) == 1 else Concat(parts, dim)


def _range(source: Expression, dim: int, start: int, stop: int, shapes: Shapes) -> Expression:
    """`Slice(source, dim, ((start, stop),))`."""
    if (start, stop) == (0, source.shape(shapes)[dim]):
        return source
    match source:
        case Dequantized():
            return _cut(source, dim, start, stop, shapes)
        case Transpose(inner, dim0, dim1):
            return Transpose(_range(inner, {dim0: dim1, dim1: dim0}.get(dim, dim), start, stop, shapes), dim0, dim1)
        case Stack(parts, along):
            if dim == along:
                return Stack(parts[start:stop], along)
            return Stack(tuple(_range(part, dim - (along < dim), start, stop, shapes) for part in parts), along)
        case Concat(parts, along):
            if dim != along:
                return Concat(tuple(_range(part, dim, start, stop, shapes) for part in parts), along)
            found, begin = [], 0
            for part in parts:
                end = begin + part.shape(shapes)[dim]
                low, high = max(start, begin), min(stop, end)
                if low < high:
                    found.append(_range(part, dim, low - begin, high - begin, shapes))
                begin = end
            return found[0] if len(found) == 1 else Concat(tuple(found), dim)
        case Take(inner, along, index):
            if dim == along:
                return Take(inner, along, index[start:stop])
            return Take(_range(inner, dim, start, stop, shapes), along, index)
        case Slice(inner, along, ranges) if dim != along:
            return Slice(_range(inner, dim, start, stop, shapes), along, ranges)
        case Tensor() | Slice():
            return Slice(source, dim, ((start, stop),))


def _cut(node: Dequantized, dim: int, start: int, stop: int, shapes: Shapes) -> Expression:
    """The same range of the codes and scales; where it does not end between two scales, a range of what those give."""
    size = node.shape(shapes)[dim]
    layouts = node.layouts(len(node.parts[0].shape(shapes)))
    # one scale for the whole dimension is every range's scale
    steps = [per for layout in layouts for along, per in layout if along == dim and per < size]
    if not any(along == dim for layout in layouts for along, _ in layout):
        return Slice(node, dim, ((start, stop),))
    step = lcm(*steps)
    low, high = start - start % step, min(size, stop + -stop % step)
    parts: list[Expression] = []
    for part, layout in zip(node.parts, layouts, strict=True):
        for place, (along, per) in enumerate(layout):
            if along == dim and per < size and (low, high) != (0, size):
                part = Slice(part, place, ((low // per, -(-high // per)),))
        parts.append(part)
    whole = replace(node, parts=tuple(parts))
    return whole if (low, high) == (start, stop) else Slice(whole, dim, ((start - low, stop - low),))

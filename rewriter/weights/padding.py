"""Padding of stored tensors: from the places of a parameter's elements to those of the tensors that it is made of.

Quantized weights keep their form: codes, scales and zero points are padded by whole groups of zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rewriter.common.errors import RewriterError
from rewriter.weights.checkpoint import Checkpoint
from rewriter.weights.expressions import (
    Concat,
    Dequantized,
    Expression,
    Shapes,
    Stack,
    Take,
    Tensor,
    Transpose,
    evaluate,
)
from rewriter.weights.header import BITS, SafetensorsHeader, TensorInfo

if TYPE_CHECKING:
    import torch

Index = tuple[int, ...]
"""The place along a dimension that each element comes from; -1: it is padding."""


class Misaligned(RewriterError):
    """Padding cuts through a group of elements that are stored together."""


def padded_tensors(expression: Expression, dim: int, index: Index, shapes: Shapes) -> dict[str, Expression]:
    """By tensor that a parameter is made of, what is stored in its place where the parameter's elements along `dim`
    come from the places `index`.

    `shapes` are those of the stored tensors. Raises Misaligned where a group of a quantized weight would hold elements
    of several, and RewriterError for a parameter that is made otherwise than by joining, stacking and transposing.
    """
    match expression:
        case Tensor(name):
            return {name: Take(expression, dim, index)}
        case Transpose(source, dim0, dim1):
            return padded_tensors(source, {dim0: dim1, dim1: dim0}.get(dim, dim), index, shapes)
        case Stack(parts, along) if dim != along:
            return _of_parts([(part, dim - (along < dim), index) for part in parts], shapes)
        case Concat(parts, along) if dim != along:
            return _of_parts([(part, dim, index) for part in parts], shapes)
        case Concat(parts, along):
            return _of_parts([(p, dim, i) for p, i in _pieces(parts, along, index, shapes)], shapes)
        case Dequantized():
            return _of_codes(expression, dim, index, shapes)
        case _:
            raise RewriterError(f"it is made of stored tensors as {expression}, which cannot be padded")


def _of_parts(parts: list[tuple[Expression, int, Index]], shapes: Shapes) -> dict[str, Expression]:
    made: dict[str, Expression] = {}
    for part, dim, index in parts:
        made |= padded_tensors(part, dim, index, shapes)
    return made


def _pieces(parts: tuple[Expression, ...], dim: int, index: Index, shapes: Shapes) -> list[tuple[Expression, Index]]:
    """The part of `index` for each of several tensors that stand one after the other: padding follows what it pads."""
    pieces: list[list[int]] = [[] for _ in parts]
    ends, total = [], 0
    for part in parts:
        total += part.shape(shapes)[dim]
        ends.append(total)
    now = 0
    for place in index:
        if place >= 0:
            now = next(i for i, end in enumerate(ends) if place < end)
        pieces[now].append(place - (ends[now - 1] if now and place >= 0 else 0))
    return [(part, tuple(piece)) for part, piece in zip(parts, pieces, strict=True)]


def _of_codes(weight: Dequantized, dim: int, index: Index, shapes: Shapes) -> dict[str, Expression]:
    """Codes, scales and zero points, each padded where the weight is."""
    if weight.scheme.startswith("bnb") or weight.scheme == "gptq":
        raise RewriterError(
            f"{weight.parts[0]} is quantized by {weight.scheme}, which cannot be padded in its quantized form. Add "
            "--dequantize"
        )
    size, made = weight.shape(shapes)[dim], dict[str, Expression]()
    layouts = weight._layouts(len(weight.parts[0].shape(shapes)))
    for number, (part, layout) in enumerate(zip(weight.parts, layouts, strict=True)):
        for place, (along, per) in enumerate(layout):
            if along != dim or (per >= size and _one_for_all(weight, shapes)):
                continue
            zero_points = weight.scheme == "awq" and place == 0 and number > 0
            packed = per > 1 and not zero_points and (number == 0 or weight.scheme == "awq")
            entries = index if per == 1 else _packed(part, index, per) if packed else _scales(part, index, per, zero_points)
            if number == len(weight.parts) - 1:  # padding has the first scale: zero times any scale is zero
                entries = tuple(max(entry, 0) for entry in entries)
            made |= padded_tensors(part, place, entries, shapes)
    return made


def _one_for_all(weight: Dequantized, shapes: Shapes) -> bool:
    """True for FP8 with a scale per tensor, or per row: no scale is of some elements of a row alone."""
    scales = weight.parts[1].shape(shapes)
    return weight.scheme == "fp8" and (len(scales) < 2 or min(weight.numbers) == 1)


def _packed(part: Expression, index: Index, per: int) -> Index:
    """The numbers that hold `per` elements each: all of them padding, or those of one number in their order."""
    result = []
    for begin in range(0, len(index), per):
        group = index[begin : begin + per]
        first = group[0]
        if set(group) == {-1}:
            result.append(-1)
        elif first % per == 0 and group == tuple(range(first, first + per)):
            result.append(first // per)
        else:
            raise Misaligned(f"{part} holds {per} elements in one number, and padding would divide them")
    return tuple(result)


def _scales(part: Expression, index: Index, per: int, whole: bool) -> Index:
    """The scales of `per` elements each; with `whole`, none of which may be padding beside others."""
    result = []
    for begin in range(0, len(index), per):
        group = index[begin : begin + per]
        found = {place // per for place in group if place >= 0}
        if len(found) > 1 or (whole and found and -1 in group):
            raise Misaligned(f"{part} holds one number for {per} elements, and padding would divide them")
        result.append(found.pop() if found else -1)
    return tuple(result)


def joined(changes: Mapping[str, Expression], more: Mapping[str, Expression]) -> dict[str, Expression]:
    """`changes` and `more`, padded in both where both change a tensor, along different dimensions.

    Raises RewriterError where they change one tensor differently.
    """
    result = dict(changes)
    for name, change in more.items():
        known = result.get(name, change)
        if known != change and isinstance(known, Take) and isinstance(change, Take) and known.dim != change.dim:
            known = replace(max(known, change, key=_along), source=min(known, change, key=_along))
        elif known != change:
            raise RewriterError(f"{name}: two parameters are made of it, which would be padded differently")
        result[name] = known
    return result


def _along(take: Take) -> int:
    return take.dim


def growth(checkpoint: Checkpoint, changes: Mapping[str, Expression]) -> float:
    """The share by which the bytes of a checkpoint's tensors grow by `changes`."""
    padded = PaddedCheckpoint(checkpoint, changes)
    before, after = (sum(info.nbytes for info in c.tensors.values()) for c in (checkpoint, padded))
    return after / before - 1


class PaddedCheckpoint(Checkpoint):
    """A checkpoint as it will be once `changes` are stored in place of the tensors that they name: headers only."""

    def __init__(self, checkpoint: Checkpoint, changes: Mapping[str, Expression]) -> None:
        headers: dict[Path, SafetensorsHeader] = {}
        for path, header in checkpoint.headers.items():
            infos = dict(header.tensors)
            for name in infos.keys() & changes.keys():
                infos[name] = _info(checkpoint, name, changes[name])
            headers[path] = replace(header, tensors=infos)
        super().__init__(checkpoint.directory, headers, checkpoint.index)
        self.source, self.changes = checkpoint, changes

    def read(self, name: str) -> torch.Tensor:
        return evaluate(self.changes.get(name, Tensor(name)), self.source.read)


def _info(checkpoint: Checkpoint, name: str, change: Expression) -> TensorInfo:
    shape, known = change.shape(checkpoint.shapes), checkpoint.info(name)
    size = BITS[known.dtype] // 8
    for length in shape:
        size *= length
    return replace(known, shape=shape, offsets=(known.offsets[0], known.offsets[0] + size))

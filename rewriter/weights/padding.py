"""Padding of stored tensors: from the places of a parameter's elements to those of the tensors that it is made of.

Quantized weights keep their form: codes, scales and zero points are padded by whole groups of zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from rewriter.common.errors import RewriterError
from rewriter.weights.checkpoint import Checkpoint
from rewriter.weights.expressions import (
    Concat,
    Dequantized,
    Expression,
    Mean,
    Shapes,
    Slice,
    Stack,
    Take,
    Tensor,
    Transpose,
    evaluate,
    is_dequantized,
)
from rewriter.weights.header import BITS, SafetensorsHeader, TensorInfo

if TYPE_CHECKING:
    import torch

Index = tuple[int, ...]
"""The place along a dimension that each element comes from; -1: it is padding."""


_AVERAGED = 1000  # rows of a table that new ones are the mean of: some in its middle, so that few are read


class Misaligned(RewriterError):
    """Padding cuts through a group of elements that are stored together."""


Dims = Mapping[int, Index]
Changes = dict[str, Expression]


@dataclass
class PaddedTensors:
    """The tensors that are stored of a checkpoint whose parameters are padded.

    `changes` are the tensors that are stored instead of the checkpoint's, by name, as expressions over the
    checkpoint's. `places` has by name of a weight (what a quantized one stands for) and dimension the place that each
    element comes from. `whole` names what quantized tensors stand for: a weight whose groups padding would cut, or that
    is quantized otherwise than in groups, is changed under that name, as what it stands for.
    """

    checkpoint: Checkpoint
    whole: Mapping[Expression, str]
    changes: Changes = field(default_factory=dict)
    places: dict[str, Dims] = field(default_factory=dict)

    def pad(self, expression: Expression, dims: Dims) -> None:
        """Let a parameter that is made as `expression` have, along each of `dims`, the elements at the places given
        there. Raises RewriterError for one that is made otherwise than by joining, stacking and transposing, and where
        another parameter is made of the same tensors and padded differently."""
        if not dims:
            return
        if expression in self.whole:
            self._note(self.whole[expression], dims)
            try:
                self._change(_stored(expression, dims, self.checkpoint))
            except Misaligned:
                self._change({self.whole[expression]: taken(expression, dims)})
            return
        match expression:
            case Tensor(name):
                self._note(name, dims)
                self._change({name: taken(expression, dims)})
            case Transpose(source):
                self.pad(source, _transposed(expression, dims))
            case Stack(parts, along) if along not in dims:
                for part in parts:
                    self.pad(part, {dim - (along < dim): index for dim, index in dims.items()})
            case Concat(parts, along):
                others = {dim: index for dim, index in dims.items() if dim != along}
                pieces = (
                    _pieces(parts, along, dims[along], self.checkpoint.shapes) if along in dims else [None] * len(parts)
                )
                for part, piece in zip(parts, pieces, strict=True):
                    self.pad(part, others if piece is None else {**others, along: piece})
            case _:
                raise RewriterError(f"it is made of stored tensors as {expression}, which cannot be padded")

    def add_rows(self, name: str, count: int, mean: bool) -> None:
        """Give a table `count` more rows: the mean of a thousand others, or zeros."""
        source, rows = Tensor(name), self.checkpoint.info(name).shape[0]
        index = (*range(rows), *[-1] * count)
        start = max(rows - _AVERAGED, 0) // 2
        some = Slice(source, 0, ((start, min(start + _AVERAGED, rows)),))
        self._note(name, {0: index})
        self._change({name: Concat((source, Mean(some, count)), 0) if mean else taken(source, {0: index})})

    def _note(self, name: str, dims: Dims) -> None:
        if self.places.setdefault(name, dims) != dims:
            raise RewriterError(f"{name}: two parameters are made of it, which would be padded differently")

    def _change(self, changes: Changes) -> None:
        self.changes |= changes


def taken(expression: Expression, dims: Dims, fill: int = 0) -> Expression:
    """The elements of `expression` at these places, `fill` where there is none."""
    for dim, index in sorted(dims.items()):
        expression = Take(expression, dim, index, fill)
    return expression


def _transposed(transpose: Transpose, dims: Dims) -> Dims:
    exchanged = {transpose.dim0: transpose.dim1, transpose.dim1: transpose.dim0}
    return {exchanged.get(dim, dim): index for dim, index in dims.items()}


def _pieces(parts: Sequence[Expression], dim: int, index: Index, shapes: Shapes) -> list[Index | None]:
    """The part of `index` for each of several tensors that stand one after the other: padding follows what it pads.
    None for one that stays as it is."""
    pieces: list[list[int]] = [[] for _ in parts]
    sizes = [part.shape(shapes)[dim] for part in parts]
    ends, now = list(accumulate(sizes)), 0
    for place in index:
        if place >= 0:
            now = next(i for i, end in enumerate(ends) if place < end)
        pieces[now].append(place if place < 0 else place - ends[now] + sizes[now])
    return [None if p == list(range(size)) else tuple(p) for p, size in zip(pieces, sizes, strict=True)]


# --- quantized weights


def _stored(weight: Expression, dims: Dims, checkpoint: Checkpoint) -> Changes:
    """Codes, scales and zero points of a quantized weight that is padded. Raises Misaligned where that cuts groups."""
    if isinstance(weight, Transpose):
        return _stored(weight.source, _transposed(weight, dims), checkpoint)
    assert isinstance(weight, Dequantized)
    return _of_codes(weight, dims, checkpoint)


# Codes that mean 0 where a stored zero point of 0 means 1, by their bits.
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}


def _of_codes(weight: Dequantized, dims: Dims, checkpoint: Checkpoint) -> Changes:
    if weight.scheme.startswith("bnb"):
        raise Misaligned(f"{weight.parts[0]} is quantized by {weight.scheme}, row by row or without regard to rows")
    padded: list[dict[int, Index]] = [{} for _ in weight.parts]
    whole, shapes = weight.shape(checkpoint.shapes), checkpoint.shapes
    layouts = weight.layouts(len(weight.parts[0].shape(shapes)))
    last = len(weight.parts) - (2 if weight.scheme == "gptq" else 1)  # the scales
    for dim, index in dims.items():
        for number, layout in enumerate(layouts):
            for place, (along, per) in enumerate(layout):
                if along != dim or (per >= whole[dim] and _one_for_all(weight, shapes)):
                    continue
                zero_points = weight.scheme == "awq" and place == 0 and number > 0
                packed = per > 1 and not zero_points and (number == 0 or weight.scheme in ("awq", "gptq"))
                part = weight.parts[number]
                made = _packed(part, index, per) if packed else _scales(part, index, per, zero_points)
                # padding has the first scale: zero times any scale is zero
                padded[number][place] = tuple(max(entry, 0) for entry in made) if number == last else made
    if weight.scheme == "gptq":
        return _of_gptq(weight, padded, dims.get(0), checkpoint)
    return _of_parts(zip(weight.parts, padded, strict=True))


def _of_gptq(
    weight: Dequantized, padded: Sequence[dict[int, Index]], inputs: Index | None, checkpoint: Checkpoint
) -> Changes:
    """GPTQ says of every input which group it is in: padding gets groups of its own, in their order where groups are
    in the inputs' order, else behind all others."""
    bits, count, added = weight.numbers
    codes, zeros, scales, groups = weight.parts
    made: Changes = {}
    if inputs is not None:
        known = checkpoint.evaluate(groups).tolist()
        per, ordered = len(known) // count, known == sorted(known)
        if inputs.count(-1) % per:
            raise Misaligned(f"{scales} holds one number for {per} inputs, and padding is no whole groups of them")
        if ordered:
            chosen = _scales(scales, inputs, per, True)
            numbers = [place // per for place in range(len(inputs))]
        else:
            extra = iter(range(inputs.count(-1)))
            numbers = [known[place] if place >= 0 else count + next(extra) // per for place in inputs]
            chosen = (*range(count), *[-1] * (inputs.count(-1) // per))
        padded[1][0], padded[2][0] = chosen, tuple(max(entry, 0) for entry in chosen)
        runs = [(number, len(list(run))) for number, run in groupby(numbers)]
        # numbers of which no two are of one tensor's elements: each run is made by filling
        made = {next(groups.tensors()): Concat(tuple(Take(groups, 0, (-1,) * n, number) for number, n in runs), 0)}
    filled = taken(codes, padded[0], _ONES[bits] if added else 0)
    made |= {next(codes.tensors()): filled} if padded[0] else {}
    return made | _of_parts([(zeros, padded[1]), (scales, padded[2])])


def _of_parts(parts: Iterable[tuple[Expression, Dims]]) -> Changes:
    return {next(part.tensors()): taken(part, dims) for part, dims in parts if dims}


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
    if per == 1:
        return index
    result = []
    for begin in range(0, len(index), per):
        group = index[begin : begin + per]
        found = {place // per for place in group if place >= 0}
        if len(found) > 1 or (whole and found and -1 in group):
            raise Misaligned(f"{part} holds one number for {per} elements, and padding would divide them")
        result.append(found.pop() if found else -1)
    return tuple(result)


def growth(checkpoint: Checkpoint, changes: Mapping[str, Expression]) -> float:
    """The share by which the bytes of a checkpoint's tensors grow by `changes`."""
    before = sum(info.nbytes for info in checkpoint.tensors.values())
    after = float(sum(info.nbytes for info in PaddedCheckpoint(checkpoint, changes).tensors.values()))
    for change in changes.values():
        weight = next(change.inputs[0].nodes()) if is_dequantized(change) else None
        while isinstance(weight, Take):
            weight = weight.source
        if weight is not None:
            held = sum(checkpoint.info(name).nbytes for name in weight.tensors())
            after += held * (prod(change.shape(checkpoint.shapes)) / prod(weight.shape(checkpoint.shapes)) - 1)
    return after / before - 1


class PaddedCheckpoint(Checkpoint):
    """A checkpoint as it will be once `changes` are stored in place of the tensors that they name: headers only."""

    def __init__(self, checkpoint: Checkpoint, changes: Mapping[str, Expression]) -> None:
        headers: dict[Path, SafetensorsHeader] = {}
        for path, header in checkpoint.headers.items():
            infos = dict(header.tensors)
            for name in infos.keys() & changes.keys():
                if is_dequantized(changes[name]):  # what it stands for is padded, not what is stored
                    continue
                infos[name] = _info(checkpoint, name, changes[name])
            headers[path] = replace(header, tensors=infos)
        super().__init__(checkpoint.directory, headers, checkpoint.index)
        self.source, self.changes = checkpoint, changes

    def read(self, name: str) -> torch.Tensor:
        return evaluate(self.changes.get(name, Tensor(name)), self.source.read)


def _info(checkpoint: Checkpoint, name: str, change: Expression) -> TensorInfo:
    shape, known = change.shape(checkpoint.shapes), checkpoint.info(name)
    size = prod(shape) * BITS[known.dtype] // 8
    return replace(known, shape=shape, offsets=(known.offsets[0], known.offsets[0] + size))

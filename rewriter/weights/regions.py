"""An expression as copies of rectangles: which region of the result comes from which view of the mapped files.

Slices, concatenations, stacks and transpositions only move elements, so every expression is a list of `Region`s. A
region's view is strided memory over the file: cutting it costs nothing, and a tile of the result is read without the
rest of it. Where rows or columns are taken in another order, a region keeps the places, and the tile gathers them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rewriter.common.errors import RewriterError
from rewriter.common.expressions import Concat, Dequantized, Expression, Slice, Stack, Take, Tensor, Transpose
from rewriter.weights.checkpoint import Checkpoint, torch_dtype
from rewriter.weights.header import BITS

Shape = tuple[int, ...]
PAGE = 4096


@dataclass(frozen=True)
class Region:
    """`result[start0:start0+shape0, ...] = view`, of which `taken` names the places of some dimensions, in order.

    The view holds raw integers, wide as dtype.
    """

    start: Shape
    view: NDArray[Any]
    dtype: str
    taken: Mapping[int, NDArray[np.intp]] = field(default_factory=dict)

    @property
    def shape(self) -> Shape:
        """The sizes of what it fills."""
        return tuple(len(self.taken[d]) if d in self.taken else size for d, size in enumerate(self.view.shape))

    @property
    def place(self) -> tuple[slice, ...]:
        """What it fills, as an index of the result."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))

    @property
    def span(self) -> int:
        """Bytes of the file that reading it may map into memory: from its first element to its last, at most."""
        if not self.view.size:
            return 0
        reach = sum((size - 1) * stride for size, stride in zip(self.view.shape, self.view.strides, strict=True))
        whole = reach + self.view.itemsize
        if 0 in self.taken and self.view.shape[0] > 1:  # rows here and there: each of them, and the pages around it
            return min(whole, len(self.taken[0]) * (abs(self.view.strides[0]) + 2 * PAGE))
        return whole

    def cut(self, dim: int, low: int, high: int) -> Region | None:
        """The part whose result indices along `dim` are in [low, high), in the same coordinates; None: no such part."""
        begin, size = self.start[dim], self.shape[dim]
        if low <= begin and begin + size <= high:
            return self
        first, last = max(low, begin), min(high, begin + size)
        if first >= last:
            return None
        inside = slice(first - begin, last - begin)
        start = _at(self.start, dim, first)
        if dim in self.taken:
            return Region(start, self.view, self.dtype, {**self.taken, dim: self.taken[dim][inside]})
        return Region(start, self.view[(slice(None),) * dim + (inside,)], self.dtype, self.taken)

    def moved(self, dim: int, by: int) -> Region:
        """The same elements, `by` further along `dim` of the result."""
        return Region(_at(self.start, dim, self.start[dim] + by), self.view, self.dtype, self.taken)

    def take(self, dim: int, places: NDArray[np.intp]) -> Region:
        """Its elements at `places` along `dim`, counted from its start, in their order; it starts at 0 there."""
        places = self.taken[dim][places] if dim in self.taken else places
        return Region(_at(self.start, dim, 0), self.view, self.dtype, {**self.taken, dim: places})

    def row(self) -> Region:
        """Itself without its first dimension, of size 1."""
        row = self.view[self.taken[0][0] if 0 in self.taken else 0]
        return Region(self.start[1:], row, self.dtype, {d - 1: places for d, places in self.taken.items() if d})

    def read(self) -> NDArray[Any]:
        """Its elements, of its shape: the view itself where nothing is taken in another order."""
        found = self.view
        for dim, places in self.taken.items():
            found = found.take(places, dim)
        return found


def regions(checkpoint: Checkpoint, expression: Expression) -> list[Region]:
    """The regions that together fill `expression`'s result, each element once. Shapes must have been checked."""
    match expression:
        case Tensor(name):
            return [_whole(checkpoint, name)]
        case Slice(source, dim, ranges):
            inner, result, end = regions(checkpoint, source), [], 0
            for start, stop in ranges:
                parts = (region.cut(dim, start, stop) for region in inner)
                result += [part.moved(dim, end - start) for part in parts if part]
                end += stop - start
            return result
        case Concat(parts_, dim):
            result, end, shapes = [], 0, checkpoint.shapes
            for piece in parts_:
                result += [region.moved(dim, end) for region in regions(checkpoint, piece)]
                end += piece.shape(shapes)[dim]
            return result
        case Stack(parts_, dim):
            return [_stacked(b, dim, index) for index, piece in enumerate(parts_) for b in regions(checkpoint, piece)]
        case Transpose(source, dim0, dim1):
            return [_transposed(b, dim0, dim1) for b in regions(checkpoint, source)]
        case Take(source, dim, places):
            return [part for b in regions(checkpoint, source) for part in _taken(b, dim, np.array(places, np.intp))]
        case Dequantized():
            raise AssertionError(f"{expression} is computed, not moved")


def _stacked(region: Region, dim: int, index: int) -> Region:
    places = {d + (d >= dim): found for d, found in region.taken.items()}
    start = (*region.start[:dim], index, *region.start[dim:])
    return Region(start, np.expand_dims(region.view, dim), region.dtype, places)


def _transposed(region: Region, dim0: int, dim1: int) -> Region:
    other = {dim0: dim1, dim1: dim0}
    places = {other.get(d, d): found for d, found in region.taken.items()}
    start = tuple(region.start[other.get(d, d)] for d in range(len(region.start)))
    return Region(start, region.view.swapaxes(dim0, dim1), region.dtype, places)


def _taken(region: Region, dim: int, places: NDArray[np.intp]) -> Iterator[Region]:
    """The regions of the result whose elements are in `region`: one for each run of places inside it."""
    begin = region.start[dim]
    inside = (begin <= places) & (places < begin + region.shape[dim])
    edges = np.flatnonzero(np.diff(inside.astype(np.int8), prepend=0, append=0))
    for low, high in edges.reshape(-1, 2).tolist():
        yield region.take(dim, places[low:high] - begin).moved(dim, low)


def tiles(parts: list[Region], shape: Shape, element: int, limit: int) -> Iterator[tuple[list[Region], Shape]]:
    """Cut a row-major result, of `element` bytes each, into consecutive pieces of at most `limit` bytes.

    Yields the regions of each piece, in its own coordinates, and its shape. A result without elements has no pieces.
    """
    if prod(shape) == 0:
        return
    if not shape or element * prod(shape) <= limit:
        yield parts, shape
        return
    row = element * prod(shape[1:])
    step = max(1, limit // row)
    for low in range(0, shape[0], step):
        high = min(low + step, shape[0])
        inside = [part.moved(0, -low) for region in parts if (part := region.cut(0, low, high))]
        if row <= limit:
            yield inside, (high - low, *shape[1:])
        else:  # one row alone is too big: cut it along its own dimensions
            yield from tiles([region.row() for region in inside], shape[1:], element, limit)


def fill(parts: list[Region], shape: Shape, dtype: str, target: memoryview) -> None:
    """Write the regions of a piece into `target`, row-major, as elements of `dtype`, rounded if theirs differs."""
    if all(region.dtype == dtype for region in parts):
        out: NDArray[Any] = np.ndarray(shape, _raw(dtype), buffer=target)
        for region in parts:
            out[region.place] = region.read()
        return
    import torch

    converted = torch.frombuffer(target, dtype=torch_dtype(dtype, "result")).reshape(shape)
    for region in parts:
        source = torch.from_numpy(region.read()).view(torch_dtype(region.dtype, "source"))
        converted[region.place].copy_(source)


def _whole(checkpoint: Checkpoint, name: str) -> Region:
    if sys.byteorder != "little":
        raise RewriterError("weights can be rewritten on little-endian machines only; this one is big-endian.")
    info = checkpoint.info(name)
    raw = _raw(info.dtype, name)
    start = (0,) * len(info.shape)
    if info.nbytes == 0:
        return Region(start, np.empty(info.shape, raw), info.dtype)
    mapping = checkpoint.mapping(info.file)
    view = np.frombuffer(mapping, raw, prod(info.shape), info.offsets[0]).reshape(info.shape)
    return Region(start, view, info.dtype)


def _raw(dtype: str, name: str = "") -> np.dtype[Any]:
    if BITS[dtype] % 8:
        raise RewriterError(
            f"{name}: dtype {dtype} ({BITS[dtype]} bits) cannot be sharded element by element. "
            "Start from the checkpoint before quantisation."
        )
    return np.dtype(f"<u{BITS[dtype] // 8}")


def _at(start: Shape, dim: int, value: int) -> Shape:
    return (*start[:dim], value, *start[dim + 1 :])

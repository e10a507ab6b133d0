"""How a runtime parameter is made from checkpoint tensors. No torch: these are names, dimensions and ranges.

A parameter that a rank holds is a rearrangement of what is on disk: the tensor itself, some of its rows or columns,
the fusion of several tensors. Every element of the result is an element of a source, so a shard needs no arithmetic,
but for tensors that are stored quantized: `Dequantized`. `rewriter.weights` reads the elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from rewriter.common.errors import RewriterError

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]


@dataclass(frozen=True)
class Tensor:
    """A tensor of the checkpoint, by its name on disk."""

    name: str

    def tensors(self) -> Iterator[str]:
        """The name of every checkpoint tensor read, in the order of reading; a tensor read twice is named twice."""
        yield self.name

    def shape(self, shapes: Shapes) -> Shape:
        """The result's shape, from the checkpoint's. RewriterError where shapes do not fit, naming tensor and sizes."""
        if self.name not in shapes:
            raise RewriterError(f"{self.name}: the checkpoint has no tensor of this name.")
        return tuple(shapes[self.name])

    def dtypes(self, stored: Mapping[str, str]) -> set[str]:
        """The dtypes of the result's elements, by safetensors' names, from those of the checkpoint's tensors."""
        return {stored[self.name]}

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class _Rearrangement:
    """Of one tensor."""

    source: Expression

    def tensors(self) -> Iterator[str]:
        return self.source.tensors()

    def dtypes(self, stored: Mapping[str, str]) -> set[str]:
        return self.source.dtypes(stored)


@dataclass(frozen=True)
class Slice(_Rearrangement):
    """The ranges [start, stop) of `source` along `dim`, one after the other. They may overlap, in any order."""

    dim: int
    ranges: tuple[tuple[int, int], ...]

    def shape(self, shapes: Shapes) -> Shape:
        """The size of `dim` becomes the sum of the ranges' lengths; an empty range is refused."""
        whole = self.source.shape(shapes)
        size = whole[_dim(self, self.dim, whole)]
        if not self.ranges:
            raise RewriterError(
                f"{self}: no range is named. At least one [start, stop) within {_sizes(whole)} is needed."
            )
        for start, stop in self.ranges:
            if not 0 <= start < stop <= size:
                raise RewriterError(
                    f"{self}: range [{start}, {stop}) does not lie in dimension {self.dim}, which has size {size} "
                    f"(shape {_sizes(whole)})."
                )
        return _resized(whole, self.dim, sum(stop - start for start, stop in self.ranges))

    def __str__(self) -> str:
        return f"{self.source}[{':, ' * self.dim}{' + '.join(f'{a}:{b}' for a, b in self.ranges)}]"


@dataclass(frozen=True)
class Take(_Rearrangement):
    """The elements of `source` along `dim` at the places `index`, as torch.index_select.

    What a `Slice` with thousands of ranges would be: neurons in another order.
    """

    dim: int
    index: tuple[int, ...]

    def shape(self, shapes: Shapes) -> Shape:
        """The size of `dim` becomes the number of places; none at all is refused."""
        whole = self.source.shape(shapes)
        size = whole[_dim(self, self.dim, whole)]
        if not self.index:
            raise RewriterError(f"{self}: no place is named. At least one within {_sizes(whole)} is needed.")
        if min(self.index) < 0 or max(self.index) >= size:
            raise RewriterError(
                f"{self}: places {min(self.index)} to {max(self.index)} do not all lie in dimension {self.dim}, which "
                f"has size {size} (shape {_sizes(whole)})."
            )
        return _resized(whole, self.dim, len(self.index))

    def __str__(self) -> str:
        first = ", ".join(map(str, self.index[:4])) + (", …" if len(self.index) > 4 else "")
        return f"{self.source}[{':, ' * self.dim}({first})]"


@dataclass(frozen=True)
class Transpose(_Rearrangement):
    """`source` with two dimensions exchanged, as torch.transpose."""

    dim0: int
    dim1: int

    def shape(self, shapes: Shapes) -> Shape:
        sizes = list(self.source.shape(shapes))
        dim0, dim1 = (_dim(self, dim, tuple(sizes)) for dim in (self.dim0, self.dim1))
        sizes[dim0], sizes[dim1] = sizes[dim1], sizes[dim0]
        return tuple(sizes)

    def __str__(self) -> str:
        return f"transpose({self.source}, {self.dim0}, {self.dim1})"


@dataclass(frozen=True)
class _Joined:
    """Of several tensors."""

    parts: tuple[Expression, ...]
    dim: int

    def tensors(self) -> Iterator[str]:
        for part in self.parts:
            yield from part.tensors()

    def dtypes(self, stored: Mapping[str, str]) -> set[str]:
        return set().union(*(part.dtypes(stored) for part in self.parts))

    def part_shapes(self, shapes: Shapes) -> list[Shape]:
        """Raises RewriterError where there is no part."""
        if not self.parts:
            raise RewriterError(f"{self}: it has no parts; at least one is needed.")
        return [part.shape(shapes) for part in self.parts]


@dataclass(frozen=True)
class Concat(_Joined):
    """The parts one after the other along `dim`, as torch.cat. Their other sizes are equal."""

    def shape(self, shapes: Shapes) -> Shape:
        first, *others = self.part_shapes(shapes)
        dim = _dim(self, self.dim, first)
        for part, shape in zip(self.parts[1:], others, strict=True):
            if len(shape) != len(first) or (shape[:dim], shape[dim + 1 :]) != (first[:dim], first[dim + 1 :]):
                raise RewriterError(
                    f"cat of {self.parts[0]} {_sizes(first)} and {part} {_sizes(shape)}: all sizes but dimension "
                    f"{dim}'s must be equal."
                )
        return _resized(first, dim, sum(shape[dim] for shape in (first, *others)))

    def __str__(self) -> str:
        return f"cat({', '.join(map(str, self.parts))}, dim={self.dim})"


@dataclass(frozen=True)
class Stack(_Joined):
    """The parts, all of one shape, along a new dimension `dim`, as torch.stack."""

    def shape(self, shapes: Shapes) -> Shape:
        first, *others = self.part_shapes(shapes)
        for part, shape in zip(self.parts[1:], others, strict=True):
            if shape != first:
                raise RewriterError(
                    f"stack of {self.parts[0]} {_sizes(first)} and {part} {_sizes(shape)}: the shapes must be equal."
                )
        if not 0 <= self.dim <= len(first):
            raise RewriterError(
                f"{self}: new dimension {self.dim} does not exist for parts of shape {_sizes(first)}: "
                f"0 to {len(first)} are possible."
            )
        return (*first[: self.dim], len(self.parts), *first[self.dim :])

    def __str__(self) -> str:
        return f"stack({', '.join(map(str, self.parts))}, dim={self.dim})"


Layout = tuple[tuple[int | None, int], ...]
"""Per dimension of a stored part: (dimension of the result, elements of it per entry), or (None, its fixed size)."""


@dataclass(frozen=True)
class Dequantized:
    """What a quantized tensor stands for, of safetensors' `dtype`: codes, the first of `parts`, times scales.

    `rewriter.kernels.stored_weights` computes it. `scheme` and `numbers` are one of
    - "fp8", elements per scale for each of the scales' dimensions, which are the last ones: codes, scales;
    - "mxfp4", none: 16 bytes of two codes for 32 elements of the last dimension, exponents of their scales;
    - "awq", (bits, inputs per group): codes, zeros and scales of a matrix [inputs, outputs];
    - "gptq", (bits, groups, what is added to zeros): codes, zeros, scales, each input's group, of [inputs, outputs];
    - "bnb4", (rows, columns): codes, and what else bitsandbytes stores of a matrix;
    - "bnb8", none: codes and a scale for each row of a matrix.
    """

    scheme: str
    parts: tuple[Expression, ...]
    numbers: tuple[int, ...]
    dtype: str

    def tensors(self) -> Iterator[str]:
        """As of the other expressions."""
        for part in self.parts:
            yield from part.tensors()

    def dtypes(self, stored: Mapping[str, str]) -> set[str]:
        """Its own, not the parts'."""
        return {self.dtype}

    def shape(self, shapes: Shapes) -> Shape:
        """The shape of the tensor that is stood for. Raises RewriterError where the parts do not fit each other."""
        if self.scheme == "bnb4":
            return self.numbers
        found = [part.shape(shapes) for part in self.parts]
        codes, *others = self.layouts(len(found[0]))
        whole = tuple(size * per for size, (dim, per) in zip(found[0], codes, strict=True) if dim is not None)
        for part, layout, sizes in zip(self.parts[1:], others, found[1:], strict=True):
            expected = tuple(per if dim is None else -(-whole[dim] // per) for dim, per in layout)
            if sizes != expected:
                raise RewriterError(
                    f"{part} has shape {_sizes(sizes)}, where {_sizes(expected)} belongs to codes {self.parts[0]} "
                    f"{_sizes(found[0])}. Download both again."
                )
        return whole

    def layouts(self, rank: int) -> tuple[Layout, ...]:
        """Of every part; `rank` is the number of dimensions of the first."""
        each: Layout = tuple((dim, 1) for dim in range(rank))
        if self.scheme == "fp8":
            first = rank - len(self.numbers)
            return each, tuple((first + dim, per) for dim, per in enumerate(self.numbers))
        if self.scheme == "mxfp4":
            return (*each[:-2], (rank - 2, 32), (None, 16)), (*each[:-2], (rank - 2, 32))
        if self.scheme == "bnb8":
            return each, ((0, 1),)
        if self.scheme == "awq":
            bits, group = self.numbers
            return ((0, 1), (1, 32 // bits)), ((0, group), (1, 32 // bits)), ((0, group), (1, 1))
        if self.scheme == "gptq":
            bits, groups, _ = self.numbers
            pack = 32 // bits
            return ((0, pack), (1, 1)), ((None, groups), (1, pack)), ((None, groups), (1, 1)), ((0, 1),)
        return ()

    def __str__(self) -> str:
        return f"{self.scheme}({', '.join(map(str, self.parts))})"


Expression: TypeAlias = Tensor | Slice | Concat | Stack | Transpose | Take | Dequantized


def substituted(expression: Expression, by: Mapping[Expression, Expression]) -> Expression:
    """`expression` with the outermost of its parts that are in `by` replaced."""
    if expression in by:
        return by[expression]
    match expression:
        case Tensor():
            return expression
        case Concat(parts) | Stack(parts) | Dequantized(_, parts):
            return replace(expression, parts=tuple(substituted(part, by) for part in parts))
        case Slice(source) | Take(source) | Transpose(source):
            return replace(expression, source=substituted(source, by))


@dataclass(frozen=True)
class Reference:
    """A tensor made by `expression`, of which rank r holds `ranges[r]` along `dim`, one after the other.

    Without `ranges` every rank holds all of it. `dtype` is safetensors' name of the one that ranks cast it to, None
    where they compute with what is stored.
    """

    expression: Expression
    dim: int | None = None
    ranges: tuple[tuple[tuple[int, int], ...], ...] | None = None
    dtype: str | None = None

    def on_rank(self, rank: int) -> Expression:
        """The part of one rank. Raises IndexError for a rank that `ranges` do not name."""
        if self.ranges is None or self.dim is None:
            return self.expression
        return Slice(self.expression, self.dim, self.ranges[rank])


def _dim(expression: Expression, dim: int, shape: Shape) -> int:
    # Negative dimensions would make two spellings of one shard, which then compare and hash as different.
    if not 0 <= dim < len(shape):
        raise RewriterError(
            f"{expression}: dimension {dim} does not exist in shape {_sizes(shape)}: it has {len(shape)} dimensions, "
            "counted from 0."
        )
    return dim


def _resized(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _sizes(shape: Shape) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"

"""How a runtime parameter is made from checkpoint tensors. No torch: these are names, dimensions and ranges.

A parameter that a rank holds is a rearrangement of what is on disk: the tensor itself, some of its rows or columns,
the fusion of several tensors. Every element of the result is an element of a source, so a shard needs no arithmetic.
`rewriter.weights` reads the elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Slice:
    """The ranges [start, stop) of `source` along `dim`, one after the other. They may overlap, in any order."""

    source: Expression
    dim: int
    ranges: tuple[tuple[int, int], ...]

    def tensors(self) -> Iterator[str]:
        """See Tensor.tensors."""
        return self.source.tensors()

    def shape(self, shapes: Shapes) -> Shape:
        """See Tensor.shape. The size of `dim` becomes the sum of the ranges' lengths; an empty range is refused."""
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
        length = sum(stop - start for start, stop in self.ranges)
        return (*whole[: self.dim], length, *whole[self.dim + 1 :])

    def __str__(self) -> str:
        return f"{self.source}[{':, ' * self.dim}{' + '.join(f'{a}:{b}' for a, b in self.ranges)}]"


@dataclass(frozen=True)
class Concat:
    """The parts one after the other along `dim`, as torch.cat. Their other sizes are equal."""

    parts: tuple[Expression, ...]
    dim: int

    def tensors(self) -> Iterator[str]:
        """See Tensor.tensors."""
        for part in self.parts:
            yield from part.tensors()

    def shape(self, shapes: Shapes) -> Shape:
        """See Tensor.shape."""
        first, *others = _part_shapes(self, self.parts, shapes)
        dim = _dim(self, self.dim, first)
        for part, shape in zip(self.parts[1:], others, strict=True):
            if len(shape) != len(first) or (shape[:dim], shape[dim + 1 :]) != (first[:dim], first[dim + 1 :]):
                raise RewriterError(
                    f"cat of {self.parts[0]} {_sizes(first)} and {part} {_sizes(shape)}: all sizes but dimension "
                    f"{dim}'s must be equal."
                )
        return (*first[:dim], first[dim] + sum(shape[dim] for shape in others), *first[dim + 1 :])

    def __str__(self) -> str:
        return f"cat({', '.join(map(str, self.parts))}, dim={self.dim})"


@dataclass(frozen=True)
class Stack:
    """The parts, all of one shape, along a new dimension `dim`, as torch.stack."""

    parts: tuple[Expression, ...]
    dim: int

    def tensors(self) -> Iterator[str]:
        """See Tensor.tensors."""
        for part in self.parts:
            yield from part.tensors()

    def shape(self, shapes: Shapes) -> Shape:
        """See Tensor.shape."""
        first, *others = _part_shapes(self, self.parts, shapes)
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


@dataclass(frozen=True)
class Transpose:
    """`source` with two dimensions exchanged, as torch.transpose."""

    source: Expression
    dim0: int
    dim1: int

    def tensors(self) -> Iterator[str]:
        """See Tensor.tensors."""
        return self.source.tensors()

    def shape(self, shapes: Shapes) -> Shape:
        """See Tensor.shape."""
        sizes = list(self.source.shape(shapes))
        dim0, dim1 = _dim(self, self.dim0, tuple(sizes)), _dim(self, self.dim1, tuple(sizes))
        sizes[dim0], sizes[dim1] = sizes[dim1], sizes[dim0]
        return tuple(sizes)

    def __str__(self) -> str:
        return f"transpose({self.source}, {self.dim0}, {self.dim1})"


@dataclass(frozen=True)
class Take:
    """The elements of `source` along `dim` at the places `index`, as torch.index_select.

    What a `Slice` with thousands of ranges would be: neurons in another order.
    """

    source: Expression
    dim: int
    index: tuple[int, ...]

    def tensors(self) -> Iterator[str]:
        """See Tensor.tensors."""
        return self.source.tensors()

    def shape(self, shapes: Shapes) -> Shape:
        """See Tensor.shape. The size of `dim` becomes the number of places; none at all is refused."""
        whole = self.source.shape(shapes)
        size = whole[_dim(self, self.dim, whole)]
        if not self.index:
            raise RewriterError(f"{self}: no place is named. At least one within {_sizes(whole)} is needed.")
        if min(self.index) < 0 or max(self.index) >= size:
            raise RewriterError(
                f"{self}: places {min(self.index)} to {max(self.index)} do not all lie in dimension {self.dim}, which "
                f"has size {size} (shape {_sizes(whole)})."
            )
        return (*whole[: self.dim], len(self.index), *whole[self.dim + 1 :])

    def __str__(self) -> str:
        first = ", ".join(map(str, self.index[:4])) + (", …" if len(self.index) > 4 else "")
        return f"{self.source}[{':, ' * self.dim}({first})]"


Expression: TypeAlias = Tensor | Slice | Concat | Stack | Transpose | Take


@dataclass(frozen=True)
class Reference:
    """A tensor made by `expression`, of which rank r holds `ranges[r]` along `dim`, one after the other.

    Without `ranges` every rank holds all of it.
    """

    expression: Expression
    dim: int | None = None
    ranges: tuple[tuple[tuple[int, int], ...], ...] | None = None

    def on_rank(self, rank: int) -> Expression:
        """The part of one rank. Raises IndexError for a rank that `ranges` do not name."""
        if self.ranges is None or self.dim is None:
            return self.expression
        return Slice(self.expression, self.dim, self.ranges[rank])


def _part_shapes(expression: Concat | Stack, parts: tuple[Expression, ...], shapes: Shapes) -> list[Shape]:
    if not parts:
        raise RewriterError(f"{expression}: it has no parts; at least one is needed.")
    return [part.shape(shapes) for part in parts]


def _dim(expression: Expression, dim: int, shape: Shape) -> int:
    # Negative dimensions would make two spellings of one shard, which then compare and hash as different.
    if not 0 <= dim < len(shape):
        raise RewriterError(
            f"{expression}: dimension {dim} does not exist in shape {_sizes(shape)}: it has {len(shape)} dimensions, "
            "counted from 0."
        )
    return dim


def _sizes(shape: Shape) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"

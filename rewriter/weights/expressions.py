"""Recipes of runtime parameters over checkpoint tensors: names, dimensions and ranges, and the values they give.

A parameter that a rank holds is a rearrangement of what is on disk: the tensor itself, some of its rows or columns,
the fusion of several tensors. Every element of the result is an element of a source, so a shard needs no arithmetic,
but for tensors that are stored quantized: `Dequantized`. torch is imported where values are computed, not before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import TYPE_CHECKING, TypeAlias

from rewriter.common.errors import RewriterError

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
Ranges = tuple[tuple[int, int], ...]


class _Node:
    """Base of all expressions. `inputs` are the expressions that it is made of."""

    @property
    def inputs(self) -> tuple[Expression, ...]:
        return ()

    def over(self, inputs: tuple[Expression, ...]) -> Expression:
        """The same operation over other inputs."""
        raise NotImplementedError

    def nodes(self) -> Iterator[Expression]:
        """Itself and all that it is made of, in the order of reading."""
        yield self  # type: ignore[misc]
        for part in self.inputs:
            yield from part.nodes()

    def tensors(self) -> Iterator[str]:
        """The name of every checkpoint tensor read, in the order of reading; a tensor read twice is named twice."""
        return (node.name for node in self.nodes() if isinstance(node, Tensor))

    def dtypes(self, stored: Mapping[str, str]) -> set[str]:
        """The dtypes of the result's elements, by safetensors' names, from those of the checkpoint's tensors."""
        return set().union(*(part.dtypes(stored) for part in self.inputs))

    def shape(self, shapes: Shapes) -> Shape:
        """The result's shape, from the checkpoint's. RewriterError where shapes do not fit, naming tensor and sizes."""
        return self._shape([part.shape(shapes) for part in self.inputs])

    def value(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The result, from the values of the inputs; a view of them where that is possible."""
        raise NotImplementedError

    def narrow(self, dim: int, start: int, stop: int, shapes: Shapes) -> Expression:
        """`Slice(self, dim, ((start, stop),))`, made of ranges of the inputs as far as those can be cut."""
        if (start, stop) == (0, self.shape(shapes)[dim]):
            return self  # type: ignore[return-value]
        return self._narrow(dim, start, stop, shapes)

    def narrowed(self, shapes: Shapes) -> Expression:
        """The same tensor with every `Slice` moved to the inputs, so that only what the result needs is read."""
        return self.over(tuple(part.narrowed(shapes) for part in self.inputs))

    def _shape(self, inputs: list[Shape]) -> Shape:
        raise NotImplementedError

    def _narrow(self, dim: int, start: int, stop: int, shapes: Shapes) -> Expression:
        return Slice(self, dim, ((start, stop),))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Tensor(_Node):
    """A tensor of the checkpoint, by its name on disk."""

    name: str

    def over(self, inputs: tuple[Expression, ...]) -> Expression:
        return self

    def shape(self, shapes: Shapes) -> Shape:
        if self.name not in shapes:
            raise RewriterError(f"{self.name}: the checkpoint has no tensor of this name.")
        return tuple(shapes[self.name])

    def dtypes(self, stored: Mapping[str, str]) -> set[str]:
        return {stored[self.name]}

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class _Rearrangement(_Node):
    """Base of the expressions over one tensor."""

    source: Expression

    @property
    def inputs(self) -> tuple[Expression, ...]:
        return (self.source,)

    def over(self, inputs: tuple[Expression, ...]) -> Expression:
        return replace(self, source=inputs[0])  # type: ignore[return-value]


@dataclass(frozen=True)
class Slice(_Rearrangement):
    """The ranges [start, stop) of `source` along `dim`, one after the other. They may overlap, in any order."""

    dim: int
    ranges: Ranges

    def _shape(self, inputs: list[Shape]) -> Shape:
        """The size of `dim` becomes the sum of the ranges' lengths; an empty range is refused."""
        (whole,) = inputs
        size = whole[_dim(self, self.dim, whole)]
        for start, stop in self.ranges:
            if not 0 <= start < stop <= size:
                raise RewriterError(
                    f"{self}: range [{start}, {stop}) does not lie in dimension {self.dim}, which has size {size} "
                    f"(shape {_sizes(whole)})."
                )
        return _resized(whole, self.dim, sum(stop - start for start, stop in self.ranges))

    def value(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        import torch

        parts = [inputs[0].narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def _narrow(self, dim: int, start: int, stop: int, shapes: Shapes) -> Expression:
        if dim != self.dim:
            return replace(self, source=self.source.narrow(dim, start, stop, shapes))
        kept = _overlaps([high - low for low, high in self.ranges], start, stop)
        return replace(self, ranges=tuple((self.ranges[i][0] + a, self.ranges[i][0] + b) for i, a, b in kept))

    def narrowed(self, shapes: Shapes) -> Expression:
        source = self.source.narrowed(shapes)
        parts = tuple(source.narrow(self.dim, start, stop, shapes) for start, stop in self.ranges)
        return parts[0] if len(parts) == 1 else Concat(parts, self.dim)

    def __str__(self) -> str:
        return f"{self.source}[{':, ' * self.dim}{' + '.join(f'{a}:{b}' for a, b in self.ranges)}]"


@dataclass(frozen=True)
class Take(_Rearrangement):
    """The elements of `source` along `dim` at the places `index`, as torch.index_select; with a `fill`, that at places
    -1.

    What a `Slice` with thousands of ranges would be: neurons in another order, with others that are padding. `fill` is
    0, or the bits of a whole number.
    """

    dim: int
    index: tuple[int, ...]
    fill: int | None = None

    def _shape(self, inputs: list[Shape]) -> Shape:
        """The size of `dim` becomes the number of places, of which there is at least one."""
        (whole,) = inputs
        size = whole[_dim(self, self.dim, whole)]
        if not self.index:
            raise RewriterError(f"{self}: no place is named. At least one within {_sizes(whole)} is needed.")
        if min(self.index) < (0 if self.fill is None else -1) or max(self.index) >= size:
            raise RewriterError(
                f"{self}: places {min(self.index)} to {max(self.index)} do not all lie in dimension {self.dim}, which "
                f"has size {size} (shape {_sizes(whole)})."
            )
        return _resized(whole, self.dim, len(self.index))

    def value(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        import torch

        index = torch.tensor(self.index)
        taken = inputs[0][(slice(None),) * self.dim + (index.clamp(min=0),)]
        if self.fill is not None:
            # by numbers: torch fills no mask of float8
            taken[(slice(None),) * self.dim + ((index < 0).nonzero()[:, 0],)] = self.fill
        return taken

    def _narrow(self, dim: int, start: int, stop: int, shapes: Shapes) -> Expression:
        if dim == self.dim:
            return replace(self, index=self.index[start:stop])
        return replace(self, source=self.source.narrow(dim, start, stop, shapes))

    def __str__(self) -> str:
        first = ", ".join(map(str, self.index[:4])) + (", …" if len(self.index) > 4 else "")
        return f"{self.source}[{':, ' * self.dim}({first})]"


@dataclass(frozen=True)
class Mean(_Rearrangement):
    """The mean of `source` over its first dimension, `count` times one after the other."""

    count: int

    def _shape(self, inputs: list[Shape]) -> Shape:
        return (self.count, *inputs[0][1:])

    def value(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        import torch

        mean = inputs[0].mean(0, keepdim=True, dtype=torch.float32).to(inputs[0].dtype)
        return mean.expand(self.count, *mean.shape[1:])

    def _narrow(self, dim: int, start: int, stop: int, shapes: Shapes) -> Expression:
        if dim == 0:
            return replace(self, count=stop - start)
        return replace(self, source=self.source.narrow(dim, start, stop, shapes))

    def __str__(self) -> str:
        return f"mean({self.source}, {self.count} times)"


@dataclass(frozen=True)
class Transpose(_Rearrangement):
    """`source` with two dimensions exchanged, as torch.transpose."""

    dim0: int
    dim1: int

    def _shape(self, inputs: list[Shape]) -> Shape:
        sizes = list(inputs[0])
        dim0, dim1 = (_dim(self, dim, tuple(sizes)) for dim in (self.dim0, self.dim1))
        sizes[dim0], sizes[dim1] = sizes[dim1], sizes[dim0]
        return tuple(sizes)

    def value(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return inputs[0].transpose(self.dim0, self.dim1)

    def _narrow(self, dim: int, start: int, stop: int, shapes: Shapes) -> Expression:
        inner = {self.dim0: self.dim1, self.dim1: self.dim0}.get(dim, dim)
        return replace(self, source=self.source.narrow(inner, start, stop, shapes))

    def __str__(self) -> str:
        return f"transpose({self.source}, {self.dim0}, {self.dim1})"


@dataclass(frozen=True)
class _Joined(_Node):
    """Base of the expressions over one or several tensors. Where their dtypes differ, the result's values are fp32."""

    parts: tuple[Expression, ...]
    dim: int

    @property
    def inputs(self) -> tuple[Expression, ...]:
        return self.parts

    def over(self, inputs: tuple[Expression, ...]) -> Expression:
        return replace(self, parts=inputs)  # type: ignore[return-value]


@dataclass(frozen=True)
class Concat(_Joined):
    """The parts one after the other along `dim`, as torch.cat. Their other sizes are equal."""

    def _shape(self, inputs: list[Shape]) -> Shape:
        first = inputs[0]
        dim = _dim(self, self.dim, first)
        for part, shape in zip(self.parts[1:], inputs[1:], strict=True):
            if len(shape) != len(first) or (shape[:dim], shape[dim + 1 :]) != (first[:dim], first[dim + 1 :]):
                raise RewriterError(
                    f"cat of {self.parts[0]} {_sizes(first)} and {part} {_sizes(shape)}: all sizes but dimension "
                    f"{dim}'s must be equal."
                )
        return _resized(first, dim, sum(shape[dim] for shape in inputs))

    def value(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        import torch

        return torch.cat(_of_one_dtype(inputs), self.dim)

    def _narrow(self, dim: int, start: int, stop: int, shapes: Shapes) -> Expression:
        if dim != self.dim:
            return self.over(tuple(part.narrow(dim, start, stop, shapes) for part in self.parts))
        kept = _overlaps([part.shape(shapes)[dim] for part in self.parts], start, stop)
        parts = tuple(self.parts[i].narrow(dim, low, high, shapes) for i, low, high in kept)
        return parts[0] if len(parts) == 1 else self.over(parts)

    def __str__(self) -> str:
        return f"cat({', '.join(map(str, self.parts))}, dim={self.dim})"


@dataclass(frozen=True)
class Stack(_Joined):
    """The parts, all of one shape, along a new dimension `dim`, as torch.stack."""

    def _shape(self, inputs: list[Shape]) -> Shape:
        first = inputs[0]
        for part, shape in zip(self.parts[1:], inputs[1:], strict=True):
            if shape != first:
                raise RewriterError(
                    f"stack of {self.parts[0]} {_sizes(first)} and {part} {_sizes(shape)}: the shapes must be equal."
                )
        return (*first[: self.dim], len(self.parts), *first[self.dim :])

    def value(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        import torch

        return torch.stack(_of_one_dtype(inputs), self.dim)

    def _narrow(self, dim: int, start: int, stop: int, shapes: Shapes) -> Expression:
        if dim == self.dim:
            return self.over(self.parts[start:stop])
        return self.over(tuple(part.narrow(dim - (self.dim < dim), start, stop, shapes) for part in self.parts))

    def __str__(self) -> str:
        return f"stack({', '.join(map(str, self.parts))}, dim={self.dim})"


Layout = tuple[tuple[int | None, int], ...]
"""Per dimension of a stored part: (dimension of the result, elements of it per entry), or (None, its fixed size)."""


@dataclass(frozen=True)
class Dequantized(_Node):
    """The tensor that a quantized one stands for, of safetensors' `dtype`: codes, the first of `parts`, times scales.

    `rewriter.kernels.stored_weights` computes it, in fp32. `scheme` and `numbers` are one of
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

    @property
    def inputs(self) -> tuple[Expression, ...]:
        return self.parts

    def over(self, inputs: tuple[Expression, ...]) -> Expression:
        return replace(self, parts=inputs)

    def dtypes(self, stored: Mapping[str, str]) -> set[str]:
        """Its own, not the parts'."""
        return {self.dtype}

    def _shape(self, inputs: list[Shape]) -> Shape:
        """The shape of the tensor that is stood for. Raises RewriterError where the parts do not fit each other."""
        if self.scheme == "bnb4":
            return self.numbers
        codes, *others = self.layouts(len(inputs[0]))
        whole = tuple(size * per for size, (dim, per) in zip(inputs[0], codes, strict=True) if dim is not None)
        for part, layout, sizes in zip(self.parts[1:], others, inputs[1:], strict=True):
            expected = tuple(per if dim is None else -(-whole[dim] // per) for dim, per in layout)
            if sizes != expected:
                raise RewriterError(
                    f"{part} has shape {_sizes(sizes)}, where {_sizes(expected)} belongs to codes {self.parts[0]} "
                    f"{_sizes(inputs[0])}. Download both again."
                )
        return whole

    def layouts(self, rank: int) -> tuple[Layout, ...]:
        """The layout of every part; `rank` is the number of dimensions of the first."""
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

    def value(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        from rewriter.kernels.stored_weights import dequantized

        return dequantized(self.scheme, inputs, self.numbers)

    def _narrow(self, dim: int, start: int, stop: int, shapes: Shapes) -> Expression:
        """The same range of codes and scales; where it does not end between two scales, a range of what those give."""
        size = self.shape(shapes)[dim]
        layouts = self.layouts(len(self.parts[0].shape(shapes)))
        if not any(along == dim for layout in layouts for along, _ in layout):
            return Slice(self, dim, ((start, stop),))
        # one scale for the whole dimension is every range's scale
        step = lcm(*(per for layout in layouts for along, per in layout if along == dim and per < size))
        low, high = start - start % step, min(size, stop + -stop % step)
        parts: list[Expression] = []
        for part, layout in zip(self.parts, layouts, strict=True):
            for place, (along, per) in enumerate(layout):
                if along == dim and per < size and (low, high) != (0, size):
                    part = Slice(part, place, ((low // per, -(-high // per)),))
            parts.append(part)
        whole = replace(self, parts=tuple(parts))
        return whole if (low, high) == (start, stop) else Slice(whole, dim, ((start - low, stop - low),))

    def __str__(self) -> str:
        return f"{self.scheme}({', '.join(map(str, self.parts))})"


Expression: TypeAlias = Tensor | Slice | Concat | Stack | Transpose | Take | Mean | Dequantized


def is_computed(expression: Expression) -> bool:
    """True where elements of the result are computed: from codes and scales, or as a mean."""
    return any(isinstance(node, Dequantized | Mean) for node in expression.nodes())


def is_dequantized(expression: Expression) -> bool:
    """True where elements of the result are computed from codes and scales."""
    return any(isinstance(node, Dequantized) for node in expression.nodes())


def evaluate(expression: Expression, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """The tensor that an expression describes over the tensors that `read` gives by name; a view where possible."""
    if isinstance(expression, Tensor):
        return read(expression.name)
    return expression.value([evaluate(part, read) for part in expression.inputs])


def substituted(expression: Expression, by: Mapping[Expression, Expression]) -> Expression:
    """`expression` with the outermost of its parts that are in `by` replaced."""
    if expression in by:
        return by[expression]
    return expression.over(tuple(substituted(part, by) for part in expression.inputs))


@dataclass(frozen=True)
class Reference:
    """A tensor made by `expression`, of which rank r holds `ranges[r]` along `dim`, one after the other.

    Without `ranges` every rank holds all of it. `dtype` is safetensors' name of the one that ranks cast it to, None
    where they compute with what is stored.
    """

    expression: Expression
    dim: int | None = None
    ranges: tuple[Ranges, ...] | None = None
    dtype: str | None = None

    def on_rank(self, rank: int) -> Expression:
        """The part of one rank. Raises IndexError for a rank that `ranges` do not name."""
        if self.ranges is None or self.dim is None:
            return self.expression
        return Slice(self.expression, self.dim, self.ranges[rank])


def _overlaps(sizes: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """The parts in [start, stop) of consecutive ones of these sizes: (number, start in it, stop in it)."""
    begin = 0
    for number, size in enumerate(sizes):
        low, high = max(start - begin, 0), min(stop - begin, size)
        if low < high:
            yield number, low, high
        begin += size


def _of_one_dtype(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    import torch

    return [*tensors] if len({t.dtype for t in tensors}) == 1 else [t.to(torch.float32) for t in tensors]


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

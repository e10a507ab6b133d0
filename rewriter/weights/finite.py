"""Weights that are no finite numbers, found in bytes that pass by anyway: a copy is looked at while it is hashed.

One NaN makes every logit NaN, so that nothing can be compared any more. Looking costs a twentieth of hashing.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rewriter.common.errors import RewriterError
from rewriter.common.expressions import Concat, Dequantized, Expression, Slice, Stack, Take, Transpose
from rewriter.weights.checkpoint import Checkpoint
from rewriter.weights.header import BITS, TensorInfo
from rewriter.weights.streams import PIECE, StreamPiece, file_pieces

if TYPE_CHECKING:
    from torch import Tensor

# dtype -> (bytes, x, m, n): an element with the bits b is not finite where (b ^ x) & m is n or more.
_PATTERNS: Mapping[str, tuple[int, int, int, int]] = {
    "F64": (8, 0, (1 << 63) - 1, 0x7FF << 52),
    "F32": (4, 0, 0x7FFF_FFFF, 0x7F80_0000),
    "C64": (4, 0, 0x7FFF_FFFF, 0x7F80_0000),
    "F16": (2, 0, 0x7FFF, 0x7C00),
    "BF16": (2, 0, 0x7FFF, 0x7F80),
    "F8_E5M2": (1, 0, 0x7F, 0x7C),
    "F8_E4M3": (1, 0, 0x7F, 0x7F),
    "F8_E8M0": (1, 0, 0xFF, 0xFF),
    "F8_E4M3FNUZ": (1, 0x7F, 0xFF, 0xFF),
    "F8_E5M2FNUZ": (1, 0x7F, 0xFF, 0xFF),
}
Watched = Mapping[str, str]
"""Tensors of a checkpoint by name, each with the dtype that its bytes stand for: scales are stored as plain bytes."""


@dataclass(frozen=True)
class NotFinite:
    """The first element of a tensor that is NaN or infinite: its place, in elements of `shape`, and the dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    element: int
    value: str

    def error(self, file: Path) -> RewriterError:
        """What is said of it."""
        return not_finite(file, placed(self.name, self.element, self.shape), f"{self.value} ({self.dtype})")


def not_finite(where: object, place: str, value: str) -> RewriterError:
    """What is said of a weight that is none."""
    return RewriterError(
        f"{where}: {place} is {value}, and a model computes nothing with that. Download it again; if its author's "
        "is the same, the training that wrote it failed"
    )


def placed(name: str, element: int, shape: tuple[int, ...]) -> str:
    """An element of a tensor, as "name[3, 17]"."""
    place = []
    for size in reversed(shape):
        element, here = divmod(element, size)
        place.append(here)
    return f"{name}{place[::-1]}" if shape else name


def watched(checkpoint: Checkpoint, expressions: Iterable[Expression | None]) -> dict[str, str]:
    """The tensors that have to be finite for these expressions to be: every tensor that they read."""
    found: dict[str, str] = {}
    for expression in (one for one in expressions if one is not None):
        found |= {name: checkpoint.info(name).dtype for name in expression.tensors()}
        for part in _dequantized(expression):
            if part.scheme == "mxfp4":  # its exponents are bytes
                found |= dict.fromkeys(part.parts[1].tensors(), "F8_E8M0")
    return found


def _dequantized(expression: Expression) -> Iterator[Dequantized]:
    match expression:
        case Dequantized():
            yield expression
        case Concat(parts) | Stack(parts):
            for part in parts:
                yield from _dequantized(part)
        case Slice(source) | Take(source) | Transpose(source):
            yield from _dequantized(source)


def first_broken(data: memoryview, dtype: str) -> int | None:
    """The first element of `data` that is not finite; None where all are, and of dtypes that hold nothing else."""
    import numpy as np

    pattern = _PATTERNS.get(dtype)
    if pattern is None or not data:
        return None
    size, other, mask, least = pattern
    bits = np.frombuffer(data, f"<u{size}")
    magnitude = ((bits ^ bits.dtype.type(other)) if other else bits) & bits.dtype.type(mask)
    if magnitude.max() < least:
        return None
    return int(np.argmax(magnitude >= least))


def looked_at(
    pieces: Iterator[StreamPiece], path: Path, tensors: Mapping[str, TensorInfo], found: Callable[[NotFinite], None]
) -> Iterator[StreamPiece]:
    """The pieces of a file that is copied as it is, from its start. Of each of `tensors`, the first element that is not
    finite is `found`."""
    numbers = {name: info for name, info in tensors.items() if info.dtype in _PATTERNS and info.nbytes}
    ordered = sorted((info.offsets[0], name, info) for name, info in numbers.items())
    starts, known = [start for start, _, _ in ordered], set[str]()

    def look(write: Callable[[memoryview], None], offset: int, target: memoryview) -> None:
        write(target)
        end = offset + len(target)
        for start, name, info in ordered[max(0, bisect_right(starts, offset) - 1) :]:
            if start >= end:
                break
            if name in known or info.offsets[1] <= offset:
                continue
            size = _PATTERNS[info.dtype][0]
            low = start + -(-max(offset - start, 0) // size) * size
            high = start + (min(end, info.offsets[1]) - start) // size * size
            place = first_broken(target[max(low - offset, 0) : max(high - offset, 0)], info.dtype)
            begin = low
            if place is None and end < info.offsets[1] and high < end:  # an element that goes on in the next piece
                place, begin = first_broken(memoryview(_read(path, high, size)), info.dtype), high
            if place is not None:
                known.add(name)
                at = begin + place * size
                element = (at - start) // (BITS[info.dtype] // 8)
                found(NotFinite(name, info.shape, info.dtype, element, said(_read(path, at, size), info.dtype)))

    offset = 0
    for piece in pieces:
        yield replace(piece, write=partial(look, piece.write, offset))
        offset += piece.nbytes


def _read(path: Path, offset: int, size: int) -> bytes:
    with open(path, "rb") as file:
        return os.pread(file.fileno(), size, offset)


def said(data: bytes, dtype: str) -> str:
    """An element that is not finite, in words."""
    if dtype in ("F64", "F32", "C64", "F16", "BF16"):
        wide = b"\0\0" + data if dtype == "BF16" else data
        (value,) = struct.unpack({2: "<e", 4: "<f", 8: "<d"}[len(wide)], wide)
        return in_words(value)
    return "infinity" if dtype == "F8_E5M2" and data[0] & 3 == 0 else "NaN"


def in_words(value: float) -> str:
    """A number that is not finite."""
    return "NaN" if value != value else "infinity" if value > 0 else "-infinity"


def refused(
    tensors: Mapping[str, TensorInfo], names: Watched, path: Path, pieces: Iterator[StreamPiece]
) -> Iterator[StreamPiece]:
    """The pieces of a file with `tensors`. Writing one raises RewriterError where it holds one of `names` that is not
    finite."""

    def refuse(what: NotFinite) -> None:
        raise what.error(path)

    inside = {name: replace(info, dtype=names[name]) for name, info in tensors.items() if name in names}
    return looked_at(pieces, path, inside, refuse) if inside else pieces


def check_finite(checkpoint: Checkpoint, names: Watched) -> None:
    """Read the checkpoint's files once. Raises RewriterError for the first of the tensors `names` that is not
    finite."""
    buffer = memoryview(bytearray(PIECE))
    for path, header in checkpoint.headers.items():
        for piece in refused(header.tensors, names, path, file_pieces(path)):
            piece.write(buffer[: piece.nbytes])


def require_finite(tensors: Iterable[tuple[str, Tensor]], where: str) -> None:
    """Raise RewriterError for the first tensor in memory that is not finite, by its name, saying that it is `where`."""
    import torch

    for name, tensor in tensors:
        if not tensor.is_floating_point() or tensor.is_meta or not tensor.numel():
            continue
        wide = tensor.detach() if tensor.element_size() > 1 else tensor.detach().float()
        if not all(bool(end.isfinite()) for end in wide.aminmax()):
            element = int(torch.argmax((~wide.isfinite()).flatten().int()))
            value = in_words(float(wide.flatten()[element]))
            raise not_finite(where, placed(name, element, tuple(tensor.shape)), value)

"""Weights that are no finite numbers, found in bytes that pass by anyway: a copy is looked at while it is hashed.

One NaN makes every logit NaN, so that nothing can be compared any more. Looking costs a twentieth of hashing.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rewriter.common.errors import RewriterError
from rewriter.weights.checkpoint import Checkpoint
from rewriter.weights.expressions import Dequantized, Expression
from rewriter.weights.header import BITS, SafetensorsHeader

if TYPE_CHECKING:
    from torch import Tensor

PIECE = 16 << 20  # bytes that are read at a time

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


def not_finite(where: object, place: str, value: str) -> RewriterError:
    """The error for a weight that is no finite number."""
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
    names: dict[str, str] = {}
    for expression in (one for one in expressions if one is not None):
        names |= {name: checkpoint.info(name).dtype for name in expression.tensors()}
        for node in expression.nodes():
            if isinstance(node, Dequantized) and node.scheme == "mxfp4":  # its exponents are bytes
                names |= dict.fromkeys(node.parts[1].tensors(), "F8_E8M0")
    return names


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


def file_pieces(path: Path, ends: Iterable[int] = ()) -> Iterator[memoryview]:
    """The bytes of a file, in pieces of at most PIECE that lie in the same memory, cut at the places `ends`.

    Raises RewriterError where the file becomes shorter meanwhile.
    """
    buffer = memoryview(bytearray(PIECE))
    with open(path, "rb") as file:
        start, size = 0, os.fstat(file.fileno()).st_size
        for end in (*ends, size):
            while start < end:
                piece = buffer[: min(PIECE, end - start)]
                if file.readinto(piece) < len(piece):
                    raise RewriterError(
                        f"{path}: it became shorter while being copied. Run again when nothing writes to it."
                    )
                start += len(piece)
                yield piece


def watched_pieces(
    path: Path, header: SafetensorsHeader, names: Watched, broken: Callable[[RewriterError, str, str], None]
) -> Iterator[memoryview]:
    """The bytes of a file with this header, tensor by tensor. For each of `names` that holds an element that is not
    finite, `broken` gets the error for the first, the tensor's name and the dtype."""
    start = header.size - sum(info.nbytes for info in header.tensors.values())
    pieces = file_pieces(path, [start, *(info.offsets[1] for info in header.tensors.values())])
    done = 0
    while done < start:
        done += len(piece := next(pieces))
        yield piece
    for name, info in header.tensors.items():
        dtype = names.get(name, "")
        looks = dtype in _PATTERNS
        while done < info.offsets[1]:
            piece = next(pieces)
            if looks and (place := first_broken(piece, dtype)) is not None:
                size, looks = _PATTERNS[dtype][0], False
                element = (done - info.offsets[0] + place * size) // (BITS[dtype] // 8)
                value = said(bytes(piece[place * size :][:size]), dtype)
                broken(not_finite(path, placed(name, element, info.shape), f"{value} ({dtype})"), name, dtype)
            done += len(piece)
            yield piece
    yield from pieces


def refuse(error: RewriterError, name: str, dtype: str) -> None:
    """Raise the error that `watched_pieces` made."""
    raise error


def check_finite(checkpoint: Checkpoint, names: Watched) -> None:
    """Read the checkpoint's files once. Raises RewriterError for the first of the tensors `names` that is not
    finite."""
    for path, header in checkpoint.headers.items():
        for _ in watched_pieces(path, header, names, refuse):
            pass


def said(data: bytes, dtype: str) -> str:
    """Name of an element that is not finite: NaN, infinity or -infinity."""
    if dtype in ("F64", "F32", "C64", "F16", "BF16"):
        wide = b"\0\0" + data if dtype == "BF16" else data
        (value,) = struct.unpack({2: "<e", 4: "<f", 8: "<d"}[len(wide)], wide)
        return in_words(value)
    return "infinity" if dtype == "F8_E5M2" and data[0] & 3 == 0 else "NaN"


def in_words(value: float) -> str:
    """Name of a number that is not finite."""
    return "NaN" if value != value else "infinity" if value > 0 else "-infinity"


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

"""Weights that are no finite numbers, seen in bytes that pass by anyway: a copy is looked at while it is hashed.

One NaN makes every logit NaN, so that nothing can be compared any more. Looking costs a twentieth of hashing.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rewriter.common.errors import RewriterError
from rewriter.weights.checkpoint import TORCH_DTYPES, Checkpoint, torch_dtype
from rewriter.weights.expressions import Dequantized, Expression
from rewriter.weights.header import SafetensorsHeader, TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

PIECE = 16 << 20  # bytes that are read at a time
Pieces = Generator[memoryview, None, None]
Watched = Mapping[str, str]
"""Tensors of a checkpoint by name, each with the dtype that its bytes stand for: scales are stored as plain bytes."""
NotFinite = tuple[RewriterError, str, str]
"""The error for an element that is not finite, its tensor, and the dtype that the bytes were taken for."""


def not_finite(
    where: object, name: str, element: int, shape: tuple[int, ...], value: float, note: str = ""
) -> RewriterError:
    """The error for an element of a weight of this shape that is no finite number: "name[3, 17] is NaN"."""
    place = []
    for size in reversed(shape):
        element, here = divmod(element, size)
        place.append(here)
    word = "NaN" if value != value else "infinity" if value > 0 else "-infinity"
    return RewriterError(
        f"{where}: {name}{place[::-1] if shape else ''} is {word}{note}, and a model computes nothing with that. "
        "Download it again; if its author's is the same, the training that wrote it failed"
    )


def watched(checkpoint: Checkpoint, expressions: Iterable[Expression | None]) -> dict[str, str]:
    """The tensors that have to be finite for these expressions to be: every tensor that they read."""
    names: dict[str, str] = {}
    for expression in (one for one in expressions if one is not None):
        names |= {name: checkpoint.info(name).dtype for name in expression.tensors()}
        for node in expression.nodes():
            if isinstance(node, Dequantized) and node.scheme == "mxfp4":  # its exponents are bytes
                names |= dict.fromkeys(node.parts[1].tensors(), "F8_E8M0")
    return names


def first_broken(values: Tensor) -> int | None:
    """The place of the first element of a tensor, as it lies in memory, that is not finite; None where all are."""
    import torch

    if not values.is_floating_point() or values.is_meta or not values.numel():
        return None
    values = values.detach()
    if values.element_size() == 1:  # its few codes are looked for: converting all would take longer than hashing them
        codes = torch.arange(256, dtype=torch.uint8)
        wrong = codes[~codes.view(values.dtype).float().isfinite()].tolist()
        data = values.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        return min((place for code in wrong if (place := data.find(code)) >= 0), default=None)
    # By bits, with numpy: torch's threads would wait on the cores that hash meanwhile.
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    infinity = int(torch.tensor(torch.inf, dtype=values.dtype).view(bits))
    magnitude = values.cpu().contiguous().view(bits).numpy() & infinity
    return int(magnitude.argmax()) if magnitude.max() == infinity else None


def require_finite(tensors: Iterable[tuple[str, Tensor]], where: str) -> None:
    """Raise RewriterError for the first tensor in memory that is not finite, by its name, saying that it is `where`."""
    for name, tensor in tensors:
        if (place := first_broken(tensor)) is not None:
            raise not_finite(where, name, place, tuple(tensor.shape), float(tensor.detach().flatten()[place]))


def checked_pieces(path: Path, header: SafetensorsHeader | None, broken: list[NotFinite]) -> Pieces:
    """The bytes of a file, in pieces of at most PIECE that lie in the same memory. With the file's header, `broken`
    gets the first element that is not finite of every tensor; bytes (U8) are taken for exponents. Raises RewriterError
    where the file becomes shorter meanwhile."""
    buffer = memoryview(bytearray(PIECE))
    tensors = [] if header is None else [(n, info) for n, info in header.tensors.items() if info.nbytes]
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = (0, tensors[0][1].offsets[0] if tensors else size, None)
        for start, end, tensor in (head, *((*info.offsets, (name, info)) for name, info in tensors)):
            for begin in range(start, end, PIECE):
                piece = buffer[: min(PIECE, end - begin)]
                if file.readinto(piece) < len(piece):
                    raise RewriterError(
                        f"{path}: it became shorter while being copied. Run again when nothing writes to it."
                    )
                if tensor is not None and (fault := _fault(path, *tensor, begin - start, piece)) is not None:
                    broken.append(fault)
                    tensor = None
                yield piece


def _fault(path: Path, name: str, info: TensorInfo, before: int, piece: memoryview) -> NotFinite | None:
    """The first element that is not finite of a tensor's bytes, `before` of which came earlier."""
    dtype = "F8_E8M0" if info.dtype == "U8" else info.dtype
    if not TORCH_DTYPES.get(dtype, "").startswith(("float", "bfloat")):
        return None
    import torch

    values = torch.frombuffer(piece, dtype=torch_dtype(dtype, name))
    if (place := first_broken(values)) is None:
        return None
    element = before // values.element_size() + place
    return not_finite(path, name, element, info.shape, float(values[place]), f" ({dtype})"), name, dtype


def refuse(broken: Iterable[NotFinite], watched: Watched) -> None:
    """Raise the error of the first of these elements that is in one of the tensors `watched`."""
    for error, name, dtype in broken:
        if watched.get(name) == dtype:
            raise error


def check_finite(checkpoint: Checkpoint, names: Watched) -> None:
    """Read the files that hold the tensors `names`. Raises RewriterError for the first that is not finite."""
    for path, header in checkpoint.headers.items():
        if names.keys().isdisjoint(header.tensors):
            continue
        broken: list[NotFinite] = []
        for _ in checked_pieces(path, header, broken):
            refuse(broken, names)

"""The header of a safetensors file: checked by the package safetensors, read, and written.

A safetensors file is 8 bytes (the header's length, little endian), the header (JSON: name -> dtype, shape,
data_offsets), then the data, without holes.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rewriter.common.errors import RewriterError

BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
    "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits per element of every dtype that the format knows."""

MAX_DIMENSIONS = 64


@dataclass(frozen=True)
class TensorInfo:
    """The place of a tensor: `nbytes` bytes of `file` between `offsets`, counted from the file's start; row-major."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    offsets: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return self.offsets[1] - self.offsets[0]


@dataclass(frozen=True)
class SafetensorsHeader:
    """One file's checked header: `tensors` in the order of their data, `metadata`, the file's `size` in bytes, and the
    sha256 of the header's JSON."""

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    size: int
    sha256: str


def read_header(path: Path) -> SafetensorsHeader:
    """Read the header of a safetensors file.

    Raises RewriterError, naming the file, for one that safetensors refuses (a header that is no JSON of tensors, data
    that overlap, leave holes or do not fit shape, dtype and file), and for a shape that torch cannot have.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise RewriterError(f"{path}: not a regular file, so it cannot hold weights.")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = file.read(8)
            if length == b"version " and size < 1024:
                raise RewriterError(f"{path}: a Git LFS pointer, not the weights themselves. Run `git lfs pull` there.")
            with safe_open(path, framework="np"):
                text = file.read(int.from_bytes(length, "little"))
    except OSError as error:
        raise RewriterError(f"{path}: cannot be read: {error.strerror}.") from error
    except SafetensorError as error:
        raise _broken(path, f"{error} (it has {size} bytes)") from error
    entries = json.loads(text)
    metadata = entries.pop("__metadata__", {})
    tensors = {}
    # Empty tensors share their offset with a neighbour: they sort before it.
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape = entry["dtype"], entry["shape"]
        # strides of an empty tensor count too
        if len(shape) > MAX_DIMENSIONS or prod(filter(None, shape)) * BITS[dtype] >= 1 << 63:
            raise _broken(path, f"{name!r} has the shape {shape!s:.80}, more than any tensor can have")
        start, stop = (8 + len(text) + offset for offset in entry["data_offsets"])
        tensors[name] = TensorInfo(dtype, tuple(shape), path, (start, stop))
    return SafetensorsHeader(tensors, metadata, size, hashlib.sha256(text).hexdigest())


def encode_header(tensors: Mapping[str, tuple[str, tuple[int, ...], int]], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the data: the header's length and the header, padded with spaces to a multiple of 8 bytes.

    `tensors` maps each name to (dtype, shape, size in bytes), in the order of the data.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape, nbytes) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 8)
    return len(text).to_bytes(8, "little") + text


def parse_json(path: Path, text: bytes, kind: str) -> Any:
    """JSON from a stranger. Raises RewriterError, naming the file, if it is none or is nested absurdly."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"its JSON cannot be read ({error})", kind) from error


def _broken(path: Path, what: str, kind: str = "safetensors file") -> RewriterError:
    return RewriterError(f"{path}: not a valid {kind}: {what}. Download it again, or ask its author.")

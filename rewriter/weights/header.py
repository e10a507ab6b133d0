"""The header of a safetensors file: read from its bytes and checked before anything believes it, and written.

A safetensors file is 8 bytes (the header's length, little endian), the header (JSON: name -> dtype, shape,
data_offsets), then the data, without holes. Checkpoints come from strangers: everything that the header says is
checked against the file's real size, so that no later code can read outside the data or take one tensor's bytes for
another's.
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

from rewriter.common.errors import RewriterError

BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
    "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits per element of every dtype that the format knows."""

# safetensors' own reader refuses longer headers; a real one has about 100 bytes per tensor.
MAX_HEADER = 100_000_000
MAX_DIMENSIONS = 64


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor is: `nbytes` bytes of `file` between `offsets`, counted from the file's start; row-major."""

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
    """Read and check the header of a safetensors file.

    Raises RewriterError, naming the file and the tensor, if the file is truncated, its length or its JSON is false, a
    name comes twice, a dtype is unknown, sizes disagree with shape and dtype, or data overlap, leave holes or exceed
    the file.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise RewriterError(f"{path}: not a regular file, so it cannot hold weights.")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length_bytes = file.read(8)
            if length_bytes == b"version " and size < 1024:
                raise RewriterError(f"{path}: a Git LFS pointer, not the weights themselves. Run `git lfs pull` there.")
            length = int.from_bytes(length_bytes, "little")
            if len(length_bytes) < 8 or length < 2:
                raise _broken(path, f"it has {size} bytes and a header of {length}, too few to be one")
            if length > min(size - 8, MAX_HEADER):
                raise _broken(
                    path, f"its header claims {length} bytes; the file has {size}, and {MAX_HEADER} is the limit"
                )
            text = file.read(length)
    except OSError as error:
        raise RewriterError(f"{path}: cannot be read: {error.strerror}.") from error
    if len(text) != length:
        raise _broken(path, "it became shorter while being read")
    if not text.startswith(b"{"):
        raise _broken(path, "its header does not start with '{'")
    entries = parse_json(path, text)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _broken(path, "its __metadata__ is not a table of strings")
    tensors = {name: _tensor(path, name, entry, start=8 + length, size=size) for name, entry in entries.items()}
    # Empty tensors share their offset with a neighbour: they sort before it.
    in_order = dict(sorted(tensors.items(), key=lambda item: item[1].offsets))
    end = 8 + length
    for name, info in in_order.items():
        if info.offsets[0] != end:
            what = "overlaps the one before it" if info.offsets[0] < end else "leaves a hole before it"
            raise _broken(path, f"the data of {name!r} starts at byte {info.offsets[0]} and {what} (expected {end})")
        end = info.offsets[1]
    if end != size:
        raise _broken(path, f"its tensors end at byte {end} and the file at {size}")
    return SafetensorsHeader(in_order, metadata, size, hashlib.sha256(text).hexdigest())


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
    if len(text) > MAX_HEADER:
        raise RewriterError(
            f"a header of {len(text)} bytes exceeds the format's limit of {MAX_HEADER}: write more, smaller files."
        )
    return len(text).to_bytes(8, "little") + text


def parse_json(path: Path, text: bytes, kind: str = "safetensors file") -> Any:
    """JSON from a stranger. RewriterError, naming the file, if it is none, is nested absurdly or has a key twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            seen: set[str] = set()
            double = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise _broken(path, f"its JSON names {double!r} twice", kind)
        return table

    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"its JSON cannot be read ({error})", kind) from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _tensor(path: Path, name: str, entry: Any, start: int, size: int) -> TensorInfo:
    try:
        name.encode()
    except UnicodeEncodeError as error:  # a lone surrogate: JSON allows it, no file can hold it
        raise _broken(path, f"the name {name!r} is not Unicode text") from error
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _broken(path, f"the entry of {name!r} does not consist of dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _broken(path, f"{name!r} has the dtype {dtype!r}; known are {', '.join(BITS)}")
    if not _counts(shape) or len(shape) > MAX_DIMENSIONS:
        wrong = f"{_short(shape)}, which is no list of at most {MAX_DIMENSIONS} sizes"
        raise _broken(path, f"{name!r} has the shape {wrong}")
    available = size - start
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1] or offsets[1] > available:
        raise _broken(path, f"{name!r} has the data_offsets {_short(offsets)}; the file has {available} bytes of data")
    if prod(size for size in shape if size) * BITS[dtype] >= 1 << 63:  # strides of an empty tensor count too
        raise _broken(path, f"{name!r} has the shape {_short(shape)}, more than any tensor can have")
    bits, nbytes = prod(shape) * BITS[dtype], offsets[1] - offsets[0]
    if bits != 8 * nbytes:
        needed = f"{dtype} of shape {_short(shape)} takes {-(-bits // 8)}"
        raise _broken(path, f"{name!r} has {nbytes} bytes of data, but {needed}")
    return TensorInfo(dtype, tuple(shape), path, (start + offsets[0], start + offsets[1]))


def _counts(value: Any) -> bool:
    # bool is an int to Python; sizes beyond 2**63 exist in no file and make products of arbitrary length.
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "..."


def _broken(path: Path, what: str, kind: str = "safetensors file") -> RewriterError:
    return RewriterError(f"{path}: not a valid {kind}: {what}. Download it again, or ask its author.")

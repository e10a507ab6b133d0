"""Checkpoint: the safetensors weights of a local Hugging Face directory, checked by header, read through mmap."""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
from collections.abc import Mapping
from functools import cached_property
from math import prod
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from rewriter.common.errors import RewriterError
from rewriter.common.files import refuse_adapter
from rewriter.weights.expressions import Expression, evaluate
from rewriter.weights.header import BITS, SafetensorsHeader, TensorInfo, parse_json, read_header

if TYPE_CHECKING:
    import torch

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
COMPARED = 1 << 24  # bytes that are compared at a time
PICKLED = ("*.bin", "*.pt", "*.pth", "*.bin.index.json", "*.ckpt", "*.pkl")
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})

TORCH_DTYPES: Mapping[str, str] = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "U16": "uint16", "I16": "int16", "F16": "float16", "BF16": "bfloat16", "U32": "uint32", "I32": "int32",
    "F32": "float32", "U64": "uint64", "I64": "int64", "F64": "float64", "C64": "complex64",
}  # fmt: skip
"""safetensors dtype -> name of the torch dtype. The packed ones (F4, F6) are missing: they cannot be addressed."""


class Checkpoint:
    """The tensors of one checkpoint, made by `Checkpoint.open`. Only headers are read until a tensor is asked for.

    `tensors` maps each name to where it is, file by file and in the order of the data; `files` are the weight files
    in that order; `metadata` is each file's own; `index` is the JSON of the index, if there is one. The files must not
    change while this object is in use.
    """

    def __init__(
        self, directory: Path, headers: Mapping[Path, SafetensorsHeader], index: Mapping[str, Any] | None = None
    ) -> None:
        self.directory = directory
        self.index = index
        self.headers = headers
        self.files: tuple[Path, ...] = tuple(headers)
        self.tensors: Mapping[str, TensorInfo] = {n: info for h in headers.values() for n, info in h.tensors.items()}
        self.metadata: Mapping[Path, Mapping[str, str]] = {path: header.metadata for path, header in headers.items()}
        self.sizes: Mapping[Path, int] = {path: header.size for path, header in headers.items()}
        self._mappings: dict[Path, mmap.mmap] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> Checkpoint:
        """Open a directory that holds model.safetensors, or model.safetensors.index.json and the files that it names.

        As for transformers, an index says which files are read, and these say which tensors they hold. Raises
        RewriterError, naming the file, if there is no such directory, no safetensors (pickled weights are never
        opened), a broken header, an index that names missing files or files outside the directory, or a tensor that
        two files hold with different values.
        """
        root = Path(directory)
        if not root.is_dir():
            what = "is a file; name the directory it lies in" if root.exists() else "no such directory"
            raise RewriterError(
                f"{root}: {what}. Expected a Hugging Face checkpoint: config.json and {SINGLE} (or {INDEX})."
            )
        refuse_adapter(root)
        # transformers looks in this order too: one file goes before an index.
        if (root / SINGLE).exists():
            return cls(root, {root / SINGLE: read_header(root / SINGLE)})
        if not (root / INDEX).exists():
            for path in (root / SINGLE, root / INDEX):
                _refuse_lost_link(path)
            raise _no_weights(root)
        index = _read_index(root / INDEX)
        headers = {root / name: read_header(root / name) for name in sorted(set(index["weight_map"].values()))}
        checkpoint = cls(root, headers, index)
        checkpoint._refuse_two_values()
        return checkpoint

    def _refuse_two_values(self) -> None:
        for path, header in self.headers.items():
            for name, info in header.tensors.items():
                kept = self.tensors[name]
                if kept.file != path and not self._same(info, kept):
                    raise RewriterError(
                        f"{self.directory}: {path.name} and {kept.file.name} hold {name!r} with different values. "
                        f"transformers takes that of {kept.file.name}: where it is the right one, "
                        f"AutoModelForCausalLM.from_pretrained({str(self.directory)!r}).save_pretrained('NEW') writes "
                        "it alone. Else download both files again."
                    )

    def _same(self, one: TensorInfo, other: TensorInfo) -> bool:
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        first, second = (memoryview(self.mapping(info.file))[slice(*info.offsets)] for info in (one, other))
        pieces = range(0, one.nbytes, COMPARED)
        return all(first[i : i + COMPARED] == second[i : i + COMPARED] for i in pieces)

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's shape: what `Expression.shape` takes."""
        return {name: info.shape for name, info in self.tensors.items()}

    @cached_property
    def dtypes(self) -> Mapping[str, str]:
        """Every tensor's dtype as safetensors calls it: what `Expression.dtypes` takes."""
        return {name: info.dtype for name, info in self.tensors.items()}

    def fingerprint(self) -> str:
        """A sha256 over what headers and files say: every name, dtype, shape, place, file size and time.

        For recognising that an interrupted job is continued on unchanged files; not a proof against forgery.
        """
        digest = hashlib.sha256()
        for path in self.files:
            status = path.stat()
            digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
        for name, info in self.tensors.items():
            digest.update(f"{name} {info.dtype} {info.shape} {info.file.name} {info.offsets}\n".encode())
        return digest.hexdigest()

    def info(self, name: str) -> TensorInfo:
        """The place of a tensor. Raises RewriterError if the checkpoint has none of this name."""
        if name not in self.tensors:
            raise RewriterError(f"{name}: {self.directory} has no tensor of this name.")
        return self.tensors[name]

    def mapping(self, path: Path) -> mmap.mmap:
        """The file as private memory, read when touched. What is written there is lost at the next `release`."""
        with self._lock:
            if path not in self._mappings:
                with open(path, "rb") as file:
                    if os.fstat(file.fileno()).st_size != self.sizes[path]:
                        raise RewriterError(f"{path}: its size changed; it had {self.sizes[path]} bytes. Run again.")
                    self._mappings[path] = mmap.mmap(file.fileno(), self.sizes[path], access=mmap.ACCESS_COPY)
            return self._mappings[path]

    def release(self) -> None:
        """Give the memory of all pages read so far back. Tensors stay valid: touching them reads the file again."""
        with self._lock:
            for mapping in self._mappings.values():
                mapping.madvise(mmap.MADV_DONTNEED)

    def read(self, name: str) -> torch.Tensor:
        """A tensor as it is on disk, without a copy: a CPU tensor over the mapped file, of the stored dtype.

        Raises RewriterError for an unknown name and for packed dtypes (F4, F6), which torch cannot address.
        """
        import torch

        info = self.info(name)
        dtype = torch_dtype(info.dtype, name)
        if info.nbytes == 0:
            return torch.empty(info.shape, dtype=dtype)
        mapping, start = self.mapping(info.file), info.offsets[0]
        return torch.frombuffer(mapping, dtype=dtype, count=prod(info.shape), offset=start).reshape(info.shape)

    def evaluate(self, expression: Expression) -> torch.Tensor:
        """The tensor that an expression describes: a view of the file where that is possible, else a copy in memory.

        What is stored quantized is given in fp32, whichever dtype it stands for, and only the parts that an
        expression takes of it are dequantized. So is what is made of floating-point tensors of several dtypes. Raises
        RewriterError where names, shapes or dtypes do not fit.
        """
        expression.shape(self.shapes)
        dtypes = expression.dtypes(self.dtypes)
        if len(dtypes) > 1 and not dtypes <= FLOATS:
            raise mixed_dtypes(self, expression)
        return evaluate(expression.narrowed(self.shapes), self.read)


def has_weights(model: object) -> bool:
    """True for a local directory that holds safetensors as transformers looks for them."""
    return isinstance(model, str | os.PathLike) and any((Path(model) / name).exists() for name in (SINGLE, INDEX))


def torch_dtype(dtype: str, name: str) -> torch.dtype:
    """The torch dtype of a safetensors dtype. Raises RewriterError, naming the tensor, for packed dtypes."""
    import torch

    result = getattr(torch, TORCH_DTYPES.get(dtype, ""), None)
    if result is None:
        raise RewriterError(
            f"{name}: dtype {dtype} ({BITS[dtype]} bits) cannot be read or sharded element by element. "
            "Start from the checkpoint before quantisation."
        )
    assert isinstance(result, torch.dtype)
    return result


def mixed_dtypes(checkpoint: Checkpoint, expression: Expression) -> RewriterError:
    """The error for an expression over tensors of several dtypes."""
    each = ", ".join(f"{name} is {checkpoint.info(name).dtype}" for name in dict.fromkeys(expression.tensors()))
    return RewriterError(f"{expression}: its tensors have different dtypes ({each}). Name one for all with --dtype.")


def _read_index(path: Path) -> dict[str, Any]:
    try:
        index = parse_json(path, path.read_bytes(), kind="index")
    except OSError as error:
        raise RewriterError(f"{path}: cannot be read: {error.strerror}.") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise RewriterError(
            f"{path}: it has no weight_map from tensor names to file names. Expected {{'weight_map': {{name: file}}}}."
        )
    for tensor, name in weight_map.items():
        # By name only: the files of a hub cache are symlinks to outside the directory, and those are fine.
        pure = PurePosixPath(name)
        leaves = pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name
        if leaves or not name.endswith(".safetensors"):
            raise RewriterError(
                f"{path}: it places {tensor!r} in {name!r}. Expected the name of a .safetensors file inside "
                f"{path.parent}; an index that points elsewhere is not followed."
            )
        if not os.path.exists(path.parent / name):  # a name too long for any file is missing too
            _refuse_lost_link(path.parent / name)
            raise RewriterError(
                f"{path.parent / name}: missing, but {path.name} places {tensor!r} there. Download it again."
            )
    return dict(index)


def _refuse_lost_link(path: Path) -> None:
    """Raise RewriterError where what is not there is the file of a link, as in copies of a cache of downloads."""
    if os.path.islink(path):
        raise RewriterError(
            f"{path}: a link to {os.readlink(path)}, which does not exist. Copy the file itself, or download it again."
        )


def _no_weights(root: Path) -> RewriterError:
    pickled = sorted(path.name for pattern in PICKLED for path in root.glob(pattern))
    if pickled:
        return RewriterError(
            f"{root}: its weights are pickled ({pickled[0]}), and unpickling runs whatever code they contain, so they "
            "are not opened. Where you trust them, convert them with transformers: "
            f"AutoModelForCausalLM.from_pretrained({str(root)!r}).save_pretrained('NEW')."
        )
    others = sorted(path.name for pattern in ("*.gguf", "*.safetensors") for path in root.glob(pattern))
    step_or_names = f" Download {SINGLE}, or all that {INDEX} names."
    if others:
        variant = others[0].removeprefix("model.").removesuffix(".safetensors")
        option = f"gguf_file={others[0]!r}" if others[0].endswith(".gguf") else f"variant={variant!r}"
        step = f"AutoModelForCausalLM.from_pretrained({str(root)!r}, {option}).save_pretrained('NEW') of transformers"
        if others[0].endswith(".safetensors") and not others[0].startswith("model."):
            step = f"rename it to {SINGLE}, where it has all weights by transformers' names"
        step_or_names = f" It has {others[0]}, which is not named as the weights of a whole model: {step}."
    return RewriterError(f"{root}: no weights: neither {SINGLE} nor {INDEX} is there.{step_or_names}")

"""Weights by reference: which ranges of a checkpoint's tensors each rank holds, as a JSON file, and reading them.

The file names every file of the checkpoint with its size and the sha256 of its header. Reading checks both, so that
a checkpoint that was replaced is refused and not read at places where something else is now.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from rewriter.common.errors import RewriterError
from rewriter.weights.checkpoint import Checkpoint, mixed_dtypes, torch_dtype
from rewriter.weights.expressions import (
    Concat,
    Dequantized,
    Expression,
    Reference,
    Slice,
    Stack,
    Take,
    Tensor,
    Transpose,
    is_dequantized,
)
from rewriter.weights.header import SafetensorsHeader, parse_json, read_header

if TYPE_CHECKING:
    import torch

SCHEMA = 1
STAGING = 32 << 20  # bytes of pinned memory through which a thread copies to a GPU


def references_text(references: Mapping[str, Reference], checkpoint: Checkpoint) -> str:
    """The JSON of a mesh's references to `checkpoint`. Raises RewriterError where they do not fit its tensors."""
    for name, reference in references.items():
        try:
            reference.expression.shape(checkpoint.shapes)
        except RewriterError as error:
            raise RewriterError(f"{name}: {error}") from error
    files = {
        path.relative_to(checkpoint.directory).as_posix(): {"size": header.size, "header": header.sha256}
        for path, header in checkpoint.headers.items()
    }
    table = {
        name: [encoded(r.expression), r.dim, r.ranges, *([r.dtype] if r.dtype else [])]
        for name, r in references.items()
    }
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in table.items())
    head = f'{{\n "schema": {SCHEMA},\n "files": {json.dumps(files)},\n "parameters": {{\n'
    return f"{head}{lines}\n }}\n}}\n"


@dataclass(frozen=True)
class RankWeights:
    """The tensors of one rank, by name; nothing but headers is read until one is asked for. `casts`: to which dtype, as
    safetensors calls it, of those that are not computed with as they are stored."""

    path: Path
    checkpoint: Checkpoint
    parameters: Mapping[str, Expression]
    casts: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, root: Path, path: Path, rank: int) -> RankWeights:
        """The weights of `rank` that the references in `path` describe, in the checkpoint of directory `root`.

        Raises RewriterError for a file that `references_text` did not write, a rank that it does not know, and a
        checkpoint that is not the one it was written for.
        """
        table = _read(path)
        try:
            files = _files(table)
            references = {
                name: Reference(decoded(source), dim, ranges and tuple(map(_pairs, ranges)), *dtype)
                for name, (source, dim, ranges, *dtype) in table["parameters"].items()
            }
            casts = {name: reference.dtype for name, reference in references.items() if reference.dtype is not None}
            parameters = {name: reference.on_rank(rank) for name, reference in references.items()}
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise _broken(path, error) from error
        checkpoint = Checkpoint(root, {root / name: _unchanged(root, name, *known) for name, known in files.items()})
        return cls(path, checkpoint, parameters, casts)

    @classmethod
    def of_file(cls, path: Path, known: tuple[int, str] | None = None, **expected: str) -> RankWeights:
        """The weights of a rank that has a file with nothing but them.

        `known` are its size in bytes and the sha256 of its header, `expected` what its metadata say ("rank", "mesh").
        Raises RewriterError for a broken header, and for one that is another.
        """
        header = read_header(path)
        for name, value in expected.items():
            if (held := header.metadata.get(name, value)) != value:
                raise RewriterError(
                    f"{path}: it holds the weights of {name} {held}, not of {name} {value}. Put the files back as "
                    "`rewrite` named them, or rewrite the model again"
                )
        if known is not None and (changed := _change(header, *known)):
            raise RewriterError(f"{path}: changed since `rewrite` wrote it: {changed}. Rewrite the model again")
        checkpoint = Checkpoint(path.parent, {path: header})
        return cls(path, checkpoint, {name: Tensor(name) for name in checkpoint.tensors})

    def dtype(self, name: str) -> torch.dtype:
        """The dtype that a tensor is cast to, else that it is stored in, or stands for where it is stored quantized."""
        if name in self.casts:
            return torch_dtype(self.casts[name], name)
        expression = self.parameters[name]
        dtypes = expression.dtypes(self.checkpoint.dtypes)
        if len(dtypes) > 1:
            raise mixed_dtypes(self.checkpoint, expression)
        return torch_dtype(next(iter(dtypes)), name)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor. Raises RewriterError where the checkpoint's tensors do not fit."""
        return self.parameters[name].shape(self.checkpoint.shapes)

    def read(
        self, names: Mapping[str, torch.dtype | None], device: torch.device | str, keep_quantized: bool = False
    ) -> dict[str, torch.Tensor]:
        """The tensors `names` on `device`, contiguous, each cast to its dtype (None: `self.dtype`).

        On the CPU a range of rows stays a view of the mapped file. Threads on all cores that this rank may use share
        the work. With `keep_quantized`, FP8 and MXFP4 weights are `StoredWeight`s where that is possible.
        """
        import torch

        from rewriter.weights.stored_weight import StoredWeight, stored

        where = torch.device(device)

        def one(item: tuple[str, torch.dtype | None]) -> tuple[str, torch.Tensor]:
            name, dtype = item
            expression = self.parameters[name]
            if dtype is None and name in self.casts:
                dtype = self.dtype(name)
            kept = stored(expression, self.checkpoint.read) if keep_quantized and is_dequantized(expression) else None
            if kept is not None:
                there = kept.moved(lambda part: _staged(part, where) if where.type == "cuda" else part.contiguous())
                return name, StoredWeight(there, dtype or self.dtype(name))
            tensor = self.checkpoint.evaluate(expression)
            if is_dequantized(expression):
                tensor = tensor.to(dtype or self.dtype(name))
            if where.type == "cuda":
                tensor = _staged(tensor, where)
            return name, tensor.to(where, dtype).contiguous()

        with ThreadPoolExecutor(_threads()) as pool:
            return dict(pool.map(one, names.items()))


def _threads() -> int:
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _staged(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on a GPU, by way of pinned memory: pages of a mapped file cannot be copied asynchronously."""
    import torch

    source = tensor.contiguous().view(-1).view(torch.uint8)
    result = torch.empty(source.numel(), dtype=torch.uint8, device=device)
    stream = torch.cuda.Stream(device)
    buffers = [torch.empty(min(STAGING, source.numel()), dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    copied = [torch.cuda.Event() for _ in buffers]
    stream.wait_stream(torch.cuda.current_stream(device))
    for index, start in enumerate(range(0, source.numel(), STAGING)):
        part = source[start : start + STAGING]
        buffer, done = buffers[index % 2][: part.numel()], copied[index % 2]
        done.synchronize()  # the copy before the last has left this buffer
        buffer.copy_(part)
        with torch.cuda.stream(stream):
            result[start : start + STAGING].copy_(buffer, non_blocking=True)
            done.record(stream)
    stream.synchronize()
    return result.view(tensor.dtype).view(tensor.shape)


def check_headers(root: Path, path: Path) -> None:
    """Compare the checkpoint in `root` with what the references in `path` were written for: sizes and headers.

    Raises RewriterError where a file is another, and where `references_text` did not write `path`.
    """
    try:
        files = _files(_read(path))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _broken(path, error) from error
    for name, known in files.items():
        _unchanged(root, name, *known)


def _files(table: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
    return {name: (int(entry["size"]), str(entry["header"])) for name, entry in table["files"].items()}


def _broken(path: Path, error: Exception) -> RewriterError:
    return RewriterError(f"{path}: not as `rewrite` wrote it (at {error}). Rewrite the model again")


def _unchanged(root: Path, name: str, size: int, digest: str) -> Any:
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts:
        raise RewriterError(f"{root}: its weights are in {name!r}, outside the directory. `rewrite` did not write that")
    path = root / name
    if not os.path.isfile(path):  # a name too long for any file is none either
        raise RewriterError(f"{path}: no such file, but weights of the ranks are ranges of it. Rewrite the model again")
    header = read_header(path)
    if changed := _change(header, size, digest):
        raise RewriterError(
            f"{path}: changed since `rewrite` wrote the weights of the ranks as ranges of it: {changed}. Rewrite the "
            "model again"
        )
    return header


def _change(header: SafetensorsHeader, size: int, digest: str) -> str:
    """The difference from the file that had this size and header; "" where there is none."""
    if header.size != size:
        return f"it has {header.size} bytes, not {size}"
    return "" if header.sha256 == digest else "its header is another"


def _read(path: Path) -> Any:
    try:
        table = parse_json(path, path.read_bytes(), kind="file of weights by reference")
    except OSError as error:
        raise RewriterError(f"{path}: cannot be read: {error.strerror}. Rewrite the model again") from error
    if not isinstance(table, dict) or table.get("schema") != SCHEMA:
        schema = table.get("schema") if isinstance(table, dict) else None
        raise RewriterError(f"{path}: schema {schema!r}, this version reads {SCHEMA}. Rewrite the model again")
    return table


def encoded(expression: Expression) -> Any:
    """An expression as JSON: a tensor's name, or a list of its kind, what it is made of, and its other fields."""
    if isinstance(expression, Tensor):
        return expression.name
    inputs = [encoded(part) for part in expression.inputs]
    kind = next(name for name, cls in _KINDS.items() if type(expression) is cls)
    return [kind, inputs if _joins(type(expression)) else inputs[0], *(getattr(expression, n) for n in _others(kind))]


def decoded(data: Any) -> Expression:
    """The expression that `encoded` wrote. Raises KeyError, TypeError or ValueError for anything else."""
    if isinstance(data, str):
        return Tensor(data)
    kind, inner, *values = data
    cls = _KINDS[kind]
    inputs = {"parts": tuple(map(decoded, inner))} if _joins(cls) else {"source": decoded(inner)}
    return cls(**inputs, **{n: _CHECKED[n](value) for n, value in zip(_others(kind), values, strict=True)})


def _pairs(ranges: Any) -> tuple[tuple[int, int], ...]:
    return tuple((int(start), int(stop)) for start, stop in ranges)


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(map(int, values))


_KINDS: Mapping[str, Any] = {
    "slice": Slice, "cat": Concat, "stack": Stack, "transpose": Transpose, "take": Take, "dequantized": Dequantized,
}  # fmt: skip
_CHECKED: Mapping[str, Callable[[Any], Any]] = {
    "dim": int, "dim0": int, "dim1": int, "ranges": _pairs, "index": _numbers, "numbers": _numbers,
    "scheme": str, "dtype": str,
}  # fmt: skip


def _joins(cls: Any) -> bool:
    return any(field.name == "parts" for field in fields(cls))


def _others(kind: str) -> list[str]:
    """The fields of a kind of expression but its inputs, in the order in which they are written."""
    return [field.name for field in fields(_KINDS[kind]) if field.name in _CHECKED]

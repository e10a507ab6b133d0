"""Many files from one checkpoint in one pass over it: copies of its files and shards, hashed on the way, on the disk
at the end.

Every output is a `Stream` of pieces (at most 1 MiB, so that what is filled is hashed from the CPU's cache). Threads
always advance the stream that is furthest behind in the source: all outputs walk through the source together, so it is
read from the disk once. Mapped pages are given back as soon as WINDOW bytes of them may be in use. Peak memory is that
and the buffers, however big the model and its tensors.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from rewriter.errors import RewriterError
from rewriter.expressions import Expression
from rewriter.weights.blocks import Block, blocks, fill, tiles
from rewriter.weights.checkpoint import TORCH_DTYPES, Checkpoint, mixed_dtypes
from rewriter.weights.header import BITS, encode_header
from rewriter.weights.sink import ALIGNMENT, BUFFER, Sink, WriteBehind
from rewriter.weights.space import available, disk_full, is_disk_full

if TYPE_CHECKING:
    import torch

PIECE = 1 << 20
# How far, in bytes of source, one output may run ahead of another, and how much of the source may be mapped at a time.
WINDOW = 256 << 20
Finished = Callable[[Path, str], None]


@dataclass(frozen=True)
class ShardPlan:
    """A safetensors file to be written: its tensors by name, each an expression and a dtype (None: as stored), and its
    metadata."""

    path: Path
    tensors: Mapping[str, tuple[Expression, torch.dtype | None]]
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Piece:
    """`nbytes` of an output; `write` puts them into memory of that size.

    `position` is about the place in the source that they come from, `mapped` how many bytes of mapped files are
    touched.
    """

    nbytes: int
    position: int
    mapped: int
    write: Callable[[memoryview], None]


@dataclass(frozen=True)
class _Planned:
    name: str
    expression: Expression
    shape: tuple[int, ...]
    dtype: str
    span: tuple[int, int]  # place and size of its first source, among all tensors of the checkpoint in this order

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * BITS[self.dtype] // 8


def convert_files(
    checkpoint: Checkpoint,
    copies: Sequence[tuple[Path, Path]],
    plans: Sequence[ShardPlan],
    *,
    link: bool = False,
    finished: Finished | None = None,
    workers: int | None = None,
) -> dict[Path, str]:
    """Write copies (source, target) and shards, all new files, in one pass; returns the sha256 of every file written.

    The copies' sources are files of the checkpoint or any others. A copy shares its blocks with the source where the
    file system can (reflink), and is a hard link only with `link`: a later save through such a link overwrites the
    source. Everything is checked before the first file is created. `finished(path, sha256)` is called, from any thread
    but one at a time, when a file is complete and on the disk. Files of a failed conversion stay behind for the caller
    to delete. Raises RewriterError for expressions that do not fit, sources that cannot be read, and a full disk;
    OSError otherwise.
    """
    planned = [_plan(checkpoint, plan) for plan in plans]
    needed = sum(item.nbytes for items in planned for item in items)
    streams: list[_Stream] = []
    before = dict(zip(checkpoint.files, accumulate(checkpoint.sizes.values(), initial=0), strict=False))
    for source, target in copies:
        shared = link_or_reflink(source, target, link)
        needed += 0 if shared else source.stat().st_size
        place = before.get(source, 0)
        streams.append(_Stream(target, place, _file_pieces(source, place), write=not shared))
    for plan, items in zip(plans, planned, strict=True):
        streams.append(_Stream(plan.path, 0, _shard_pieces(checkpoint, plan, items), write=True))
    try:
        return _Pass(checkpoint, streams, finished).run(workers or min(8, len(os.sched_getaffinity(0))))
    except OSError as error:
        if is_disk_full(error) and streams:
            raise disk_full(streams[0].path.parent, needed, available(streams[0].path.parent)) from error
        raise


def write_shards(
    checkpoint: Checkpoint, plans: Sequence[ShardPlan], finished: Finished | None = None
) -> dict[Path, str]:
    """Write safetensors files from a checkpoint: `convert_files` without copies."""
    return convert_files(checkpoint, [], plans, finished=finished)


def copy_file(source: Path, target: Path, link: bool = False) -> str:
    """Copy any one file as `convert_files` does, onto the disk; returns its sha256."""
    nowhere = Checkpoint(source.parent, {})
    return convert_files(nowhere, [(source, target)], [], link=link)[target]


def plan_bytes(checkpoint: Checkpoint, plans: Sequence[ShardPlan]) -> int:
    """Bytes of data that the plans will write, headers not counted. Raises RewriterError as `convert_files` does."""
    return sum(item.nbytes for plan in plans for item in _plan(checkpoint, plan))


def link_or_reflink(source: Path, target: Path, link: bool) -> bool:
    """Make `target` without writing data, as a hard link (`link`) or a reflink; whether that was possible. Raises
    OSError."""
    import fcntl

    source = source.resolve(
        strict=True
    )  # a hub cache's files are symlinks; a link to the link would break with the cache
    if link:
        try:
            os.link(source, target)
        except OSError as error:
            raise RewriterError(
                f"--link: {target} cannot be a hard link to {source}: {error.strerror}. Drop --link to copy."
            ) from error
        return True
    ficlone = 0x40049409
    with open(source, "rb") as original, open(target, "xb") as clone:
        try:
            fcntl.ioctl(clone.fileno(), ficlone, original.fileno())
        except OSError:  # another file system, or one that cannot: the caller copies
            shared = False
        else:
            shared = True
            os.fsync(clone.fileno())
    if not shared:
        target.unlink()
    return shared


class _Stream:
    """One output: its pieces, taken one buffer at a time by one thread at a time; written and finished by other
    threads."""

    def __init__(self, path: Path, position: int, pieces: Iterator[_Piece], write: bool) -> None:
        self.path = path
        self.position = position
        self.mapped = 0
        self.busy = False
        self.done = False
        self.digest = hashlib.sha256()
        self._pieces = pieces
        self._write = write
        self._next: _Piece | None = None
        self._begun = False
        self._sink: Sink | None = None
        self._carry = b""
        self._offset = 0
        self._lock = threading.Lock()
        self._open_writes = 1  # the reading itself counts as one

    def step(self, behind: WriteBehind, complete: Callable[[_Stream], None]) -> None:
        """Fill, hash and hand on one buffer. `complete` is called, on a writing thread, once all of the file is on the
        disk."""
        if not self._begun:  # only now is any file opened: there may be hundreds
            self._begun = True
            self._sink = Sink(self.path) if self._write else None
            self._advance()
        buffer = behind.buffer()
        try:
            filled = len(self._carry)
            buffer[:filled] = self._carry
            while self._next is not None and filled + self._next.nbytes <= BUFFER:
                part = buffer[filled : filled + self._next.nbytes]
                self._next.write(part)
                self.digest.update(part)
                filled += len(part)
                self.mapped += self._next.mapped
                self._advance()
            self.done = self._next is None
            # O_DIRECT writes whole blocks: the rest starts the next buffer.
            whole = filled - filled % ALIGNMENT
            self._carry = bytes(buffer[whole:filled])
        except BaseException:
            behind.release(buffer)
            raise
        offset, self._offset = self._offset, self._offset + whole
        with self._lock:
            self._open_writes += 1
        behind.submit(lambda: self._written(buffer[:whole], offset, complete), buffer)
        if self.done:
            behind.submit(lambda: self._written(None, 0, complete))

    def close(self) -> None:
        """Close the file as it is."""
        if self._sink is not None:
            self._sink.close()

    def _advance(self) -> None:
        self._next = next(self._pieces, None)
        if self._next is not None:
            self.position = max(self.position, self._next.position)

    def _written(self, data: memoryview | None, offset: int, complete: Callable[[_Stream], None]) -> None:
        if data is not None and self._sink is not None:
            self._sink.write(data, offset)
        with self._lock:
            self._open_writes -= 1
            last = self._open_writes == 0
        if last:
            if self._sink is not None:
                self._sink.finish(self._carry, self._offset)
            complete(self)


class _Pass:
    """All streams, advanced together. One object, one run."""

    def __init__(self, checkpoint: Checkpoint, streams: Sequence[_Stream], finished: Finished | None) -> None:
        self._checkpoint = checkpoint
        self._streams = streams
        self._finished = finished
        self._turn = threading.Condition()
        self._error: BaseException | None = None
        self._hashes: dict[Path, str] = {}
        self._mapped = 0

    def run(self, workers: int) -> dict[Path, str]:
        behind = WriteBehind(count=workers + 8, threads=2, failed=self._fail)
        threads = [
            threading.Thread(target=self._work, args=(behind,), name=f"read-{i}", daemon=True) for i in range(workers)
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException as error:  # Ctrl-C reaches only this thread
            self._fail(error)
            raise
        finally:
            for thread in threads:
                thread.join()
            behind.close()
            for stream in self._streams:
                stream.close()
        if self._error is not None:
            raise self._error
        return {stream.path: self._hashes[stream.path] for stream in self._streams}

    def _work(self, behind: WriteBehind) -> None:
        while (stream := self._take()) is not None:
            try:
                stream.step(behind, self._complete)
            except BaseException as error:
                self._fail(error)
            with self._turn:
                stream.busy = False
                self._mapped += stream.mapped
                stream.mapped = 0
                if self._mapped > WINDOW:
                    self._mapped = 0
                    self._checkpoint.release()
                self._turn.notify_all()

    def _take(self) -> _Stream | None:
        """The idle stream that is furthest behind; None when all are done or one failed."""
        with self._turn:
            while True:
                open_ = [stream for stream in self._streams if not stream.done]
                if self._error is not None or not open_:
                    return None
                behind = min(stream.position for stream in open_)
                idle = [stream for stream in open_ if not stream.busy]
                first = min(idle, key=lambda stream: stream.position, default=None)
                if first is not None and first.position <= behind + WINDOW:
                    first.busy = True
                    return first
                self._turn.wait()

    def _complete(self, stream: _Stream) -> None:
        with self._turn:
            digest = self._hashes[stream.path] = stream.digest.hexdigest()
            if self._finished is not None:
                self._finished(stream.path, digest)

    def _fail(self, error: BaseException) -> None:
        with self._turn:
            self._error = self._error or error
            self._turn.notify_all()


def _plan(checkpoint: Checkpoint, plan: ShardPlan) -> list[_Planned]:
    """What a shard holds, in the order of its data: by element size, so that all stay aligned, then as in source."""
    result = []
    names = {name: dtype for dtype, name in TORCH_DTYPES.items()}
    shapes = checkpoint.shapes
    order = sorted(checkpoint.tensors, key=lambda name: -BITS[checkpoint.tensors[name].dtype])
    places = dict(zip(order, accumulate((checkpoint.tensors[name].nbytes for name in order), initial=0), strict=False))
    for name, (expression, target) in plan.tensors.items():
        shape = expression.shape(shapes)
        sources = [checkpoint.info(source) for source in expression.tensors()]
        stored = {info.dtype for info in sources}
        if target is None and len(stored) > 1:
            raise mixed_dtypes(checkpoint, expression)
        dtype = next(iter(stored)) if target is None else names[str(target).removeprefix("torch.")]
        for source_dtype in stored - {dtype}:
            if not _converts(source_dtype) or not _converts(dtype):
                raise RewriterError(
                    f"{name}: {source_dtype} cannot become {dtype}: only floating-point weights are converted."
                )
        if any(BITS[kind] % 8 for kind in stored):
            raise RewriterError(
                f"{name}: packed dtype {dtype} cannot be sharded. Start from the checkpoint before quantisation."
            )
        first = min(expression.tensors(), key=places.__getitem__)
        span = (places[first], checkpoint.info(first).nbytes)
        result.append(_Planned(name, expression, shape, dtype, span))
    return sorted(result, key=lambda item: (-BITS[item.dtype], item.span))


def _converts(dtype: str) -> bool:
    return dtype in ("F64", "F32", "F16", "BF16")


def _shard_pieces(checkpoint: Checkpoint, plan: ShardPlan, items: Sequence[_Planned]) -> Iterator[_Piece]:
    header = encode_header({item.name: (item.dtype, item.shape, item.nbytes) for item in items}, plan.metadata)
    yield from _constant(header)
    for item in items:
        parts = blocks(checkpoint, item.expression)
        element, done = BITS[item.dtype] // 8, 0
        for part, shape in tiles(parts, item.shape, element, PIECE):
            nbytes, mapped = element * prod(shape), sum(block.span for block in part)
            position = item.span[0] + item.span[1] * done // item.nbytes
            yield _Piece(nbytes, position, mapped, _filler(part, shape, item.dtype))
            done += nbytes


def _filler(parts: list[Block], shape: tuple[int, ...], dtype: str) -> Callable[[memoryview], None]:
    return lambda target: fill(parts, shape, dtype, target)


def _constant(data: bytes) -> Iterator[_Piece]:
    for start in range(0, len(data), PIECE):
        part = data[start : start + PIECE]
        yield _Piece(len(part), 0, 0, lambda target, part=part: target.__setitem__(slice(None), part))  # type: ignore[misc]


def _file_pieces(path: Path, place: int) -> Iterator[_Piece]:
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size

        def read(target: memoryview, offset: int) -> None:
            while target:
                count = os.preadv(file.fileno(), [target], offset)
                if count == 0:
                    raise RewriterError(
                        f"{path}: it became shorter while being copied. Run again when nothing writes to it."
                    )
                target, offset = target[count:], offset + count

        for offset in range(0, size, PIECE):
            nbytes = min(PIECE, size - offset)
            yield _Piece(nbytes, place + offset, 0, lambda target, offset=offset: read(target, offset))  # type: ignore[misc]

"""Many files from one checkpoint in one pass over it: copies of its files and shards, hashed, on the disk at the end.

What is filled (pieces of at most 1 MiB) is hashed from the CPU's cache and written from the same buffer. Mapped pages
are given back as soon as `WINDOW` bytes of them may be in use. Peak memory is that and the buffers, however big the
model and its tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate
from math import inf, isfinite, prod
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from rewriter.common.errors import RewriterError
from rewriter.common.expressions import Expression, Slice
from rewriter.weights.checkpoint import FLOATS, TORCH_DTYPES, Checkpoint, mixed_dtypes, torch_dtype
from rewriter.weights.early_copies import EarlyCopies
from rewriter.weights.finite import Watched, first_broken, in_words, not_finite, placed, refused
from rewriter.weights.header import BITS, encode_header
from rewriter.weights.narrowing import is_dequantized
from rewriter.weights.regions import fill, regions, tiles
from rewriter.weights.sink import Sink, reflink_into
from rewriter.weights.space import available, disk_full, is_disk_full
from rewriter.weights.streams import (
    PIECE,
    WINDOW,
    Finished,
    Stream,
    StreamPiece,
    StreamRun,
    file_pieces,
    processors,
)

if TYPE_CHECKING:
    import torch

COMPUTED = 16 << 20  # bytes of dequantized weights that are computed at a time


@dataclass(frozen=True)
class ShardPlan:
    """A safetensors file to be written: its tensors by name, each an expression and a dtype (None: as stored)."""

    path: Path
    tensors: Mapping[str, tuple[Expression, torch.dtype | None]]
    metadata: Mapping[str, str] = field(default_factory=dict)


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
    early: EarlyCopies | None = None,
    watched: Watched = MappingProxyType({}),
    finished: Finished | None = None,
    workers: int | None = None,
) -> dict[Path, str]:
    """Write copies (source, target) and shards, all new files, in one pass; returns the sha256 of every file written.

    The copies' sources are files of the checkpoint or any others. A copy shares its blocks with the source where the
    file system can (reflink), and is a hard link only with `link`: a later save through such a link overwrites the
    source. What `early` has begun to copy is taken from there. Everything is checked before the first file is created,
    but that the tensors `watched` are finite, and stay so in the dtype that is written: that is seen on the way.
    `finished(path, sha256)` is called, from any thread but one at a time, when a file is complete and on the disk.
    Files of a failed conversion stay behind for the caller to delete. Raises RewriterError for expressions that do not
    fit, weights that are not finite, a source that shrinks and a full disk; OSError otherwise.
    """
    planned = [_plan(checkpoint, plan) for plan in plans]
    needed = sum(item.nbytes for items in planned for item in items)
    streams: list[Stream] = []
    before = dict(zip(checkpoint.files, accumulate(checkpoint.sizes.values(), initial=0), strict=False))
    begun = {} if early is None else {source: target for source, target in copies if source in early.sources}
    for source, target in copies:
        shared = (link or source not in begun) and link_or_reflink(source, target, link)
        needed += 0 if shared else source.stat().st_size
        if source not in begun:
            place = before.get(source, 0)
            sink = None if shared else partial(Sink, target)
            pieces = file_pieces(source, place)
            if source in checkpoint.headers:
                pieces = refused(checkpoint.headers[source].tensors, watched, source, pieces)
            streams.append(Stream(target, place, pieces, sink))
    for plan, items in zip(plans, planned, strict=True):
        streams.append(Stream(plan.path, 0, _shard_pieces(checkpoint, plan, items, watched), partial(Sink, plan.path)))
    # Copies read different files. Only shards have to wait for each other, and for copies of what they are made of.
    run = StreamRun(checkpoint, streams, finished, WINDOW if plans else inf)
    try:
        hashes = run.run(workers or processors())
        for source, target in begun.items():
            assert early is not None
            early.check_finite(source, watched)
            hashes[target] = early.sha256(source) if link else early.take(source, target)
            if finished is not None:
                finished(target, hashes[target])
    except OSError as error:
        if is_disk_full(error):
            directory = [*(target for _, target in copies), *(plan.path for plan in plans)][0].parent
            raise disk_full(directory, needed, available(directory)) from error
        raise
    return hashes


def write_shards(checkpoint: Checkpoint, plans: Sequence[ShardPlan]) -> dict[Path, str]:
    """Write safetensors files from a checkpoint: `convert_files` without copies."""
    return convert_files(checkpoint, [], plans)


def plan_bytes(checkpoint: Checkpoint, plans: Sequence[ShardPlan]) -> int:
    """Bytes of data that the plans will write, headers not counted. Raises RewriterError as `convert_files` does."""
    return sum(item.nbytes for plan in plans for item in _plan(checkpoint, plan))


def link_or_reflink(source: Path, target: Path, link: bool) -> bool:
    """Make `target` without writing data, as a hard link (`link`) or a reflink; whether that was possible."""
    # A hub cache's files are symlinks: a link to the link would break with the cache.
    source = source.resolve(strict=True)
    if link:
        try:
            os.link(source, target)
        except OSError as error:
            raise RewriterError(
                f"--link: {target} cannot be a hard link to {source}: {error.strerror}. Drop --link to copy."
            ) from error
        return True
    with open(target, "xb") as clone:
        shared = reflink_into(clone.fileno(), source)
        if shared:
            os.fsync(clone.fileno())
    if not shared:
        target.unlink()
    return shared


def _plan(checkpoint: Checkpoint, plan: ShardPlan) -> list[_Planned]:
    """What a shard holds, in the order of its data: by element size, so that all stay aligned, then as in source."""
    result = []
    names = {name: dtype for dtype, name in TORCH_DTYPES.items()}
    shapes = checkpoint.shapes
    order = sorted(checkpoint.tensors, key=lambda name: -BITS[checkpoint.tensors[name].dtype])
    places = dict(zip(order, accumulate((checkpoint.tensors[name].nbytes for name in order), initial=0), strict=False))
    for name, (expression, target) in plan.tensors.items():
        shape = expression.shape(shapes)
        stored = expression.dtypes(checkpoint.dtypes)
        if target is None and len(stored) > 1:
            raise mixed_dtypes(checkpoint, expression)
        dtype = next(iter(stored)) if target is None else names[str(target).removeprefix("torch.")]
        for source_dtype in stored - {dtype}:
            if not {source_dtype, dtype} <= FLOATS:
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


def _shard_pieces(
    checkpoint: Checkpoint, plan: ShardPlan, items: Sequence[_Planned], watched: Watched
) -> Iterator[StreamPiece]:
    header = encode_header({item.name: (item.dtype, item.shape, item.nbytes) for item in items}, plan.metadata)
    yield from _constant(header)
    for item in items:
        element, done = BITS[item.dtype] // 8, 0
        computed = is_dequantized(item.expression)
        pieces = (_computed if computed else _moved)(checkpoint, item, element)
        looks = not watched.keys().isdisjoint(item.expression.tensors())
        for nbytes, mapped, write in pieces:
            if looks:
                write = partial(_checked, checkpoint, item, write, done // element)
            yield StreamPiece(nbytes, item.span[0] + item.span[1] * done // item.nbytes, mapped, write)
            done += nbytes


Piece = tuple[int, int, Callable[[memoryview], None]]  # bytes to write, bytes of files mapped, what writes them


def _moved(checkpoint: Checkpoint, item: _Planned, element: int) -> Iterator[Piece]:
    for parts, shape in tiles(regions(checkpoint, item.expression), item.shape, element, PIECE):
        write = partial(fill, parts, shape, item.dtype)
        yield element * prod(shape), sum(region.span for region in parts), write


def _computed(checkpoint: Checkpoint, item: _Planned, element: int) -> Iterator[Piece]:
    """Of an expression over quantized tensors: dequantized in steps of the first dimension, written piece by piece."""
    row = element * prod(item.shape[1:])
    rows = max(1, COMPUTED // row)
    for low in range(0, item.shape[0], rows):
        high = min(low + rows, item.shape[0])
        part = Slice(item.expression, 0, ((low, high),))
        values = cache(lambda part=part: _bytes(checkpoint, part, item.dtype))
        total = row * (high - low)
        for start in range(0, total, PIECE):
            end = min(start + PIECE, total)
            yield end - start, 2 * (end - start), partial(_put_range, values, start, end)


def _checked(
    checkpoint: Checkpoint, item: _Planned, write: Callable[[memoryview], None], before: int, target: memoryview
) -> None:
    """Write a piece of a tensor, after `before` elements of it. Raises RewriterError where one is not finite."""
    write(target)
    if (place := first_broken(target, item.dtype)) is None:
        return
    name, element = item.name, before + place
    value = float(checkpoint.evaluate(item.expression).reshape(-1)[element])
    where, file = placed(name, element, item.shape), checkpoint.info(next(item.expression.tensors())).file
    if not isfinite(value):
        raise not_finite(file, where, in_words(value))
    import torch

    most = torch.finfo(torch_dtype(item.dtype, name)).max
    raise RewriterError(
        f"{file}: {where} is {value:g}, and {item.dtype} holds at most {most:g}. Write another dtype (--dtype bf16 "
        "or fp32)"
    )


def _bytes(checkpoint: Checkpoint, expression: Expression, dtype: str) -> memoryview:
    import torch

    values = checkpoint.evaluate(expression).to(torch_dtype(dtype, "result")).contiguous()
    return memoryview(values.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _put_range(values: Callable[[], memoryview], start: int, end: int, target: memoryview) -> None:
    target[:] = values()[start:end]


def _constant(data: bytes) -> Iterator[StreamPiece]:
    for start in range(0, len(data), PIECE):
        part = data[start : start + PIECE]
        yield StreamPiece(len(part), 0, 0, partial(_put, part))


def _put(data: bytes, target: memoryview) -> None:
    target[:] = data

"""Files written by a pool of threads: copies of a checkpoint's files and new shards, hashed on the way.

A thread fills one file at a time, piece by piece: each piece is hashed and written from the same memory. So memory is
bounded by the threads and not by the model. Where the file system can share blocks (reflinks), a copy costs no disk,
and is only hashed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from pathlib import Path
from threading import Event
from types import MappingProxyType

from rewriter.common.errors import RewriterError
from rewriter.weights.checkpoint import Checkpoint
from rewriter.weights.early_copies import EarlyCopies
from rewriter.weights.finite import Watched, file_pieces, refuse, watched_pieces
from rewriter.weights.hashed_files import processors, reflink, write
from rewriter.weights.shards import ShardPlan, planned_tensors, shard_pieces
from rewriter.weights.space import available, disk_full, is_disk_full


def convert_files(
    checkpoint: Checkpoint,
    copies: Sequence[tuple[Path, Path]],
    plans: Sequence[ShardPlan],
    *,
    link: bool = False,
    early: EarlyCopies | None = None,
    watched: Watched = MappingProxyType({}),
    finished: Callable[[Path, str], None] = lambda path, sha256: None,
) -> dict[Path, str]:
    """Write copies (source, target) and shards, all new files; returns the sha256 of every file written.

    The copies' sources are files of the checkpoint or any others. A copy shares its blocks with the source where the
    file system can (reflink), and is a hard link only with `link`: a later save through such a link overwrites the
    source. What `early` has begun to copy is taken from there. Everything is checked before the first file is created,
    but that the tensors `watched` are finite, and stay so in the dtype that is written: that is seen on the way.
    `finished(path, sha256)` is called when a file is complete and on the disk. Files of a failed conversion stay behind
    for the caller to delete. Raises RewriterError for expressions that do not fit, weights that are not finite, a
    source that shrinks and a full disk; OSError otherwise.
    """
    planned = [planned_tensors(checkpoint, plan) for plan in plans]
    needed = sum(item.nbytes for items in planned for item in items)
    begun = {source: target for source, target in copies if early is not None and source in early.sources}
    hashes: dict[Path, str] = {}
    jobs: dict[Future[str], Path] = {}
    stop = Event()
    pool = ThreadPoolExecutor(processors(), "copy")
    try:
        for source, target in copies:
            shared = (link or source not in begun) and link_or_reflink(source, target, link)
            needed += 0 if shared else source.stat().st_size
            if source not in begun:
                jobs[pool.submit(_copied, checkpoint, source, None if shared else target, watched, stop)] = target
        for plan, items in zip(plans, planned, strict=True):
            pieces = shard_pieces(checkpoint, items, plan.metadata, watched)
            jobs[pool.submit(_made, plan.path, pieces, stop)] = plan.path
        for job in as_completed(jobs):
            hashes[jobs[job]] = job.result()
            finished(jobs[job], hashes[jobs[job]])
        for source, target in begun.items():
            assert early is not None
            early.check_finite(source, watched)
            hashes[target] = early.sha256(source) if link else early.take(source, target)
            finished(target, hashes[target])
    except OSError as error:
        if is_disk_full(error):
            directory = [*(target for _, target in copies), *(plan.path for plan in plans)][0].parent
            raise disk_full(directory, needed, available(directory)) from error
        raise
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)
    return hashes


def _copied(checkpoint: Checkpoint, source: Path, target: Path | None, watched: Watched, stop: Event) -> str:
    """The sha256 of `source`, written to `target` unless that is None."""
    header = checkpoint.headers.get(source)
    pieces = file_pieces(source) if header is None else watched_pieces(source, header, watched, refuse)
    return _made(target, pieces, stop)


def _made(path: Path | None, pieces: Iterable[memoryview], stop: Event) -> str:
    try:
        with nullcontext() if path is None else open(path, "xb") as file:
            return write(pieces, file, stop)
    except OSError as error:
        error.filename = error.filename or (path and os.fspath(path))
        raise


def link_or_reflink(source: Path, target: Path, link: bool) -> bool:
    """Make `target` without writing data, as a hard link (`link`) or a reflink; False where that was not possible."""
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
        shared = reflink(source, clone)
        os.fsync(clone.fileno())
    if not shared:
        target.unlink()
    return shared

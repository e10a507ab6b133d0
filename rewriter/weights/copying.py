"""A conversion's weight files: copies of the checkpoint's files, and new shards over it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, as_completed
from pathlib import Path
from types import MappingProxyType

from rewriter.common.errors import RewriterError
from rewriter.weights.checkpoint import Checkpoint
from rewriter.weights.early_copies import EarlyCopies, HashedFiles
from rewriter.weights.finite import Watched
from rewriter.weights.shards import ShardPlan, planned_tensors, shard_pieces


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
    source that shrinks; OSError otherwise.
    """
    planned = [planned_tensors(checkpoint, plan) for plan in plans]
    begun = {source: target for source, target in copies if early is not None and source in early.sources}
    hashes: dict[Path, str] = {}
    jobs: dict[Future[str], tuple[Path | None, Path]] = {}
    with HashedFiles() as files:
        for source, target in copies:
            if link:
                _link(source, target)
            if source not in begun:
                jobs[files.copy(checkpoint, source, None if link else target)] = source, target
        for plan, items in zip(plans, planned, strict=True):
            jobs[files.write(shard_pieces(checkpoint, items, plan.metadata, watched), plan.path)] = None, plan.path
        for job in as_completed(jobs):
            copied, target = jobs[job]
            hashes[target] = job.result() if copied is None else files.sha256(copied, watched)
            finished(target, hashes[target])
    for source, target in begun.items():
        assert early is not None
        hashes[target] = early.sha256(source, watched)
        if not link:
            early.take(source, target)
        finished(target, hashes[target])
    return hashes


def _link(source: Path, target: Path) -> None:
    """Make `target` a hard link to the data of `source`. Raises RewriterError where that is not possible."""
    source = source.resolve(strict=True)  # a hub cache's files are symlinks: a link to one would break with the cache
    try:
        os.link(source, target)
    except OSError as error:
        raise RewriterError(
            f"--link: {target} cannot be a hard link to {source}: {error.strerror}. Drop --link to copy."
        ) from error

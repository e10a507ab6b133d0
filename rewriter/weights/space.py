"""Room on a disk: asked for before writing, and named when it ran out all the same."""

from __future__ import annotations

import os
from pathlib import Path

from rewriter.common.errors import RewriterError


def available(path: Path) -> int:
    """Bytes that this user can still write on the file system of `path`, or of its nearest parent that exists."""
    status = os.statvfs(existing(path))
    return status.f_bavail * status.f_frsize


def require_space(path: Path, nbytes: int) -> None:
    """Raise RewriterError unless `nbytes` can be written on the file system of `path`."""
    if nbytes > (free := available(path)):
        raise RewriterError(
            f"{path}: {_size(nbytes)} are needed there and {_size(free)} are free. Make room or choose another --out."
        )


def existing(path: Path) -> Path:
    """`path`, or its nearest parent that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def disk_full(path: Path, nbytes: int | None) -> RewriterError:
    """The error for a disk that ran full: `nbytes` were to be written in all (None: unknown)."""
    needed = f"{_size(nbytes)} are needed in all and " if nbytes else "only "
    left = _size(available(path.parent))
    return RewriterError(f"{path}: the disk is full: {needed}{left} were left. Make room or choose another --out.")


def _size(nbytes: int) -> str:
    return f"{nbytes} bytes ({nbytes / 1e9:.2f} GB)" if nbytes >= 10_000_000 else f"{nbytes} bytes"

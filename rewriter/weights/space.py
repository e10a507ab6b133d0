"""Room on a disk: asked for before writing, and named when it ran out all the same."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from rewriter.common.errors import RewriterError


def available(path: Path) -> int:
    """Bytes that this user can still write on the file system of `path`, or of its nearest parent that exists."""
    status = _status(path)
    return status.f_bavail * status.f_frsize


def require_space(path: Path, nbytes: int, files: int = 0) -> None:
    """Raise RewriterError unless `nbytes` in `files` files can be written on the file system of `path`."""
    free = available(path)
    if nbytes > free:
        raise RewriterError(
            f"{path}: {_size(nbytes)} are needed there and {_size(free)} are free. Make room or choose another --out."
        )
    status = _status(path)
    if status.f_files and files > status.f_favail:  # file systems without a table of inodes say 0
        raise RewriterError(
            f"{path}: {files} files are needed there and {status.f_favail} inodes are free. Delete files or choose "
            "another --out."
        )


def _status(path: Path) -> os.statvfs_result:
    return os.statvfs(existing(path))


def existing(path: Path) -> Path:
    """`path`, or its nearest parent that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def is_disk_full(error: BaseException) -> bool:
    """True for an exception that says that the disk, or this user's quota, is used up."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def disk_full(path: Path, nbytes: int | None, free: int) -> RewriterError:
    """The error for a disk that ran full: `nbytes` were to be written in all (None: unknown), `free` were left."""
    needed = (
        f"{_size(nbytes)} are needed in all and {_size(free)} were left" if nbytes else f"only {_size(free)} were left"
    )
    return RewriterError(f"{path}: the disk is full: {needed}. Make room or choose another --out.")


def _size(nbytes: int) -> str:
    return f"{nbytes} bytes ({nbytes / 1e9:.2f} GB)" if nbytes >= 10_000_000 else f"{nbytes} bytes"

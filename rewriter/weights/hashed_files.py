"""Files that are hashed while they are written, without a name where the file system can, or by sharing data."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from threading import Event
from typing import BinaryIO

from rewriter.weights.space import existing

FICLONE = 0x40049409


def write(pieces: Iterable[memoryview], file: BinaryIO | None, stop: Event) -> str:
    """The sha256 of the pieces one after the other, which are on the disk then, in `file` unless that is None.

    Raises InterruptedError where `stop` is set meanwhile.
    """
    digest = hashlib.sha256()
    for piece in pieces:
        if stop.is_set():
            raise InterruptedError
        digest.update(piece)
        if file is not None:
            file.write(piece)
            if hasattr(os, "posix_fadvise"):  # begins to bring it to the disk, which else would wait for the end
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if file is not None:
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def reflink(source: Path, target: BinaryIO) -> bool:
    """Make an open, empty file share the data of `source`; False on another file system, or one without reflinks."""
    with open(source, "rb") as original:
        try:
            fcntl.ioctl(target.fileno(), FICLONE, original.fileno())
        except OSError:
            return False
    return True


def reflinks(source: Path, directory: Path) -> bool:
    """True where a file in `directory`, or in its nearest parent that exists, can share the data of `source`."""
    try:
        with unnamed(existing(directory)) as file:
            return reflink(source, file)
    except OSError:
        return False


def unnamed(directory: Path) -> BinaryIO:
    """A new file in a directory, open for writing, which has no name and ends when it is closed. Raises OSError."""
    return os.fdopen(os.open(directory, getattr(os, "O_TMPFILE", 0) | os.O_WRONLY, 0o666), "wb")


def processors() -> int:
    """Number of threads worth having: of the cores that this process may use, at most 8."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)

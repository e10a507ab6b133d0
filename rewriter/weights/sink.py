"""Writing files past the page cache: aligned buffers, filled and hashed by one thread, written by another.

Where the file system allows O_DIRECT, the data go from our buffers to the disk without a copy in the page cache; that
is what lets a conversion write twice a checkpoint's bytes in about the time of one `cp`. Elsewhere the same code
writes as usual.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rewriter.weights.space import existing

# Offsets, lengths and addresses of O_DIRECT are multiples of this on every Linux file system of today.
ALIGNMENT = 4096
BUFFER = 4 << 20
O_DIRECT: int = getattr(os, "O_DIRECT", 0)


class Sink:
    """One new file, written at given offsets, then closed with everything on the disk.

    `write` takes aligned offsets and lengths from several threads; `finish` takes the rest that is not a whole block.
    `fd` is an empty file that is open already: it is written in place of a new one at `path`, and closed.
    """

    def __init__(self, path: Path, fd: int | None = None) -> None:
        self.path = path
        if fd is not None:
            self._fd = fd
            return
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        try:
            self._fd = os.open(path, flags | O_DIRECT, 0o666)
        except OSError as error:  # tmpfs before Linux 6.6, some network file systems
            if error.errno != errno.EINVAL or not O_DIRECT:
                raise
            # Linux may have created the file before it refused the flag.
            self._fd = os.open(path, (flags & ~os.O_EXCL) | os.O_TRUNC, 0o666)

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of `data` at `offset`. Raises OSError."""
        while data:
            direct = self._direct()
            try:
                done = os.pwrite(self._fd, data, offset)
            except OSError as error:
                # The file system opened with O_DIRECT and cannot write so. What counts is whether this write was
                # direct: another thread that met the same may have left O_DIRECT meanwhile.
                if error.errno == errno.EINVAL and direct:
                    self._buffered()
                    continue
                error.filename = str(self.path)
                raise
            data, offset = data[done:], offset + done
            if data and done % ALIGNMENT:  # a short write left O_DIRECT's grid; the next one says why (a full disk)
                self._buffered()

    def finish(self, rest: bytes, offset: int) -> None:
        """Write the last bytes, wait until the file is on the disk, close it. Raises OSError."""
        if rest:
            self._buffered()
            self.write(memoryview(rest), offset)
        os.fsync(self._fd)
        self.close()

    def close(self) -> None:
        """Close the file as it is."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _direct(self) -> bool:
        return bool(fcntl.fcntl(self._fd, fcntl.F_GETFL) & O_DIRECT)

    def _buffered(self) -> None:
        """Write through the page cache from now on."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~O_DIRECT)


class WriteBehind:
    """A pool of buffers and the threads that write them. Memory is bounded by `count` buffers of BUFFER bytes."""

    def __init__(self, count: int, threads: int, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        # Anonymous maps start at a page, as O_DIRECT wants.
        for _ in range(count):
            self._free.put(memoryview(mmap.mmap(-1, BUFFER)))
        self._pool = ThreadPoolExecutor(threads, "write")

    def buffer(self) -> memoryview:
        """A buffer for the caller to fill; waits until one is free. It must come back through `submit` or `release`."""
        return self._free.get()

    def release(self, buffer: memoryview) -> None:
        """Give a buffer back unused."""
        self._free.put(buffer)

    def submit(self, job: Callable[[], None], buffer: memoryview | None = None) -> None:
        """Run `job` on a writing thread, then free `buffer`. What it raises goes to `failed`."""

        def run() -> None:
            try:
                job()
            except BaseException as error:
                self._failed(error)
            finally:
                if buffer is not None:
                    self._free.put(buffer)

        self._pool.submit(run)

    def close(self) -> None:
        """Run what was submitted, then stop the threads."""
        self._pool.shutdown()


def unnamed(directory: Path) -> int:
    """A new file in a directory, open for writing, which has no name and ends with its descriptor. Raises OSError."""
    flags = getattr(os, "O_TMPFILE", 0) | os.O_WRONLY | os.O_CLOEXEC
    try:
        return os.open(directory, flags | O_DIRECT, 0o666)
    except OSError:
        return os.open(directory, flags, 0o666)


def reflinks(source: Path, directory: Path) -> bool:
    """Whether a file in `directory` can share the data of `source`."""
    try:
        fd = unnamed(existing(directory))
    except OSError:
        return False
    try:
        return reflink_into(fd, source)
    finally:
        os.close(fd)


def reflink_into(fd: int, source: Path) -> bool:
    """Make the open, empty file `fd` share the data of `source` (the FICLONE ioctl); False where that cannot be done:
    on another file system, or on one without reflinks."""
    ficlone = 0x40049409
    with open(source, "rb") as original:
        try:
            fcntl.ioctl(fd, ficlone, original.fileno())
        except OSError:
            return False
    return True

"""Files copied and hashed by threads, which may begin before it is known whether the copies are wanted.

A conversion nearly always copies the checkpoint's files as they are, which is known when the model is traced and
verified: the disk would stand idle until then. Early copies have no name, so that nothing of them can stay. Nothing
imports torch here before there is a piece of weights to look at.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from pathlib import Path
from threading import Event
from types import MappingProxyType
from typing import BinaryIO, Self

from rewriter.common.errors import RewriterError
from rewriter.weights.checkpoint import Checkpoint
from rewriter.weights.finite import PIECE, NotFinite, Pieces, Watched, checked_pieces, refuse
from rewriter.weights.space import available, existing

_FICLONE = 0x40049409


class HashedFiles:
    """Files that a pool of threads hashes, and writes where they cannot share their blocks with the source.

    A thread fills one file at a time, piece by piece: each piece is hashed and written from the same memory. So memory
    is bounded by the threads and not by the model.
    """

    def __init__(self) -> None:
        self._stop = Event()
        self._pool = ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0))))
        self._copies: dict[Path, tuple[Future[str], list[NotFinite]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End all that is not finished."""
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    def copy(self, checkpoint: Checkpoint, source: Path, target: Path | BinaryIO | None) -> Future[str]:
        """Begin to copy `source` to a new file, or an open one (None: only hash it). The result is its sha256."""
        broken: list[NotFinite] = []
        job = self.write(checked_pieces(source, checkpoint.headers.get(source), broken), target, source)
        self._copies[source] = job, broken
        return job

    def write(self, pieces: Pieces, target: Path | BinaryIO | None, source: Path | None = None) -> Future[str]:
        """Begin to write pieces one after the other, those of `source` if that is given. The result is their sha256,
        once they are on the disk."""

        def written() -> str:
            digest = hashlib.sha256()
            with closing(pieces), open(target, "xb") if isinstance(target, Path) else nullcontext(target) as file:
                shared = file is None or (source is not None and reflink(source, file))
                with nullcontext() if shared or file is None else _DirectWriter(file.fileno()) as disk:
                    for piece in pieces:
                        if self._stop.is_set():
                            raise InterruptedError
                        digest.update(piece)
                        if disk is not None:
                            disk.write(piece)
                if file is not None:
                    os.fsync(file.fileno())
            return digest.hexdigest()

        return self._pool.submit(written)

    def sha256(self, source: Path, watched: Watched = MappingProxyType({})) -> str:
        """The hash of a file that is copied, once all of it was read. Raises what stopped the copying, and
        RewriterError where one of its tensors `watched` is not finite."""
        job, broken = self._copies[source]
        digest = job.result()
        refuse(broken, watched)
        return digest


class _DirectWriter:
    """Writes to a new file past the page cache (O_DIRECT), where the file system can: its write-back is slower than the
    disk. A thread writes one buffer while the caller fills the other. A context manager: leaving it waits for the disk.
    """

    def __init__(self, file: int) -> None:
        self.file, self.flags = file, fcntl.fcntl(file, fcntl.F_GETFL)
        self.buffers = [mmap.mmap(-1, PIECE), mmap.mmap(-1, PIECE)]  # aligned to pages
        self.filled, self.under_way = 0, Future[None]()
        self.under_way.set_result(None)
        self.pool = ThreadPoolExecutor(1)
        with suppress(OSError):
            fcntl.fcntl(file, fcntl.F_SETFL, self.flags | os.O_DIRECT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self.pool:
            self.under_way.result()
            if kind is None:
                self._write(self.buffers[0], self.filled)

    def write(self, piece: memoryview) -> None:
        while piece:
            part = piece[: PIECE - self.filled]
            self.buffers[0][self.filled : self.filled + len(part)] = part
            piece, self.filled = piece[len(part) :], self.filled + len(part)
            if self.filled == PIECE:
                self.under_way.result()
                self.under_way, self.filled = self.pool.submit(self._write, self.buffers[0], PIECE), 0
                self.buffers.reverse()

    def _write(self, buffer: mmap.mmap, nbytes: int) -> None:
        if nbytes < PIECE:  # the end of a file need not be whole blocks
            fcntl.fcntl(self.file, fcntl.F_SETFL, self.flags)
        with memoryview(buffer)[:nbytes] as data:
            done = 0
            while done < nbytes:
                try:
                    done += os.write(self.file, data[done:])
                except OSError as error:  # what takes the flag and cannot write so, or what is left of a short write
                    if error.errno != errno.EINVAL or not fcntl.fcntl(self.file, fcntl.F_GETFL) & os.O_DIRECT:
                        raise
                    fcntl.fcntl(self.file, fcntl.F_SETFL, self.flags)


class EarlyCopies(HashedFiles):
    """The weight files of a checkpoint, copied and hashed while this process does other things; a context manager.

    Copies lie in the file system of `directory`, without a name until `take` gives them one; leaving the block, as the
    end of the process, frees those that were not taken. Without a directory files are only hashed. Raises OSError where
    the file system has no files without names.
    """

    def __init__(self, checkpoint: Checkpoint, directory: Path | None) -> None:
        super().__init__()
        self.sources = checkpoint.files
        self._files: dict[Path, BinaryIO] = {}
        try:
            for source in self.sources:
                file = None if directory is None else self._files.setdefault(source, unnamed(directory))
                self.copy(checkpoint, source, file)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End all copying and free what was not taken."""
        super().stop()
        while self._files:
            self._files.popitem()[1].close()

    def take(self, source: Path, target: Path) -> str:
        """Give the copy of `source` the name `target`, once all of it is on the disk; returns its sha256."""
        digest = self.sha256(source)
        with self._files.pop(source) as file:
            # That a directory is given makes Python ask for what the link points to.
            os.link(f"/proc/self/fd/{file.fileno()}", target, src_dir_fd=file.fileno())
        return digest

    def nbytes(self) -> int:
        """Bytes of the disk that copies take which have no name yet."""
        return sum(512 * os.fstat(file.fileno()).st_blocks for file in self._files.values())


def begun_copies(
    model: str | os.PathLike[str], out: str | os.PathLike[str] | None, link: bool
) -> AbstractContextManager[EarlyCopies | None]:
    """Copies of a local model's weights for a conversion to a new `out`; with `link` they are hashed only.

    None where they cannot be made, which the conversion itself will report.
    """
    taken = out is not None and os.path.lexists(out)
    if taken or not Path(model).is_dir():
        return nullcontext()
    place = existing(Path(os.path.realpath("out" if out is None else out)).parent)
    try:
        checkpoint = Checkpoint.open(model)
        if not link and sum(checkpoint.sizes.values()) > available(place):
            return nullcontext()
        return EarlyCopies(checkpoint, None if link else place)
    except (RewriterError, OSError):
        return nullcontext()


def reflink(source: Path, target: BinaryIO) -> bool:
    """Make an open, empty file share the data of `source`; False on another file system, or one without reflinks."""
    with open(source, "rb") as original:
        try:
            fcntl.ioctl(target.fileno(), _FICLONE, original.fileno())
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
    return os.fdopen(os.open(directory, os.O_TMPFILE | os.O_WRONLY, 0o666), "wb")

"""Copies that begin before it is known whether they are wanted: in files without a name, of which nothing can stay.

What a conversion copies is nearly always the checkpoint's files as they are. Whether that is so is known when the model
is traced, and whether it is kept when it is verified: the disk would stand idle until then. Nothing here imports torch:
in a program copying begins before that is there; the command imports torch first, to fork its server before there are
threads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import BinaryIO, Self

from rewriter.common.errors import RewriterError
from rewriter.weights.checkpoint import Checkpoint
from rewriter.weights.finite import Watched, watched_pieces
from rewriter.weights.hashed_files import processors, reflink, unnamed, write
from rewriter.weights.space import available, existing


class EarlyCopies:
    """The weight files of a checkpoint, copied and hashed by threads of this process while it does other things.

    A context manager. Copies lie in the file system of `directory`, without a name until `take` gives them one; leaving
    the block, as the end of the process, frees those that were not taken. Without a directory files are only hashed.
    Raises OSError where the file system has no files without names.
    """

    def __init__(self, checkpoint: Checkpoint, directory: Path | None) -> None:
        self.sources = checkpoint.files
        self._stop = Event()
        self._pool = ThreadPoolExecutor(processors(), "early copies")
        self._files: dict[Path, BinaryIO] = {}
        self._broken: dict[Path, list[tuple[RewriterError, str, str]]] = {source: [] for source in self.sources}
        self._sha256: dict[Path, Future[str]] = {}
        try:
            for source in self.sources:
                file = None
                if directory is not None:
                    file = self._files[source] = unnamed(directory)
                    if reflink(source, file):
                        file = None
                header, broken = checkpoint.headers[source], self._broken[source]
                looked = {n: "F8_E8M0" if info.dtype == "U8" else info.dtype for n, info in header.tensors.items()}
                pieces = watched_pieces(source, header, looked, lambda *what, broken=broken: broken.append(what))
                self._sha256[source] = self._pool.submit(write, pieces, file, self._stop)
        except BaseException:
            self.stop()
            raise

    @classmethod
    def begin(cls, model: str | os.PathLike[str], out: str | os.PathLike[str], link: bool) -> EarlyCopies | None:
        """Copies for an output at `out`; None where they cannot be made, which the conversion itself will report."""
        place = existing(Path(os.path.realpath(out)).parent)
        try:
            checkpoint = Checkpoint.open(model)
            if not link and sum(checkpoint.sizes.values()) > available(place):
                return None
            return cls(checkpoint, None if link else place)
        except (RewriterError, OSError):
            return None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End all copying and free what was not taken."""
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)
        while self._files:
            self._files.popitem()[1].close()

    def sha256(self, source: Path) -> str:
        """The hash of a file, once all of it was read. Raises what stopped the copying."""
        return self._sha256[source].result()

    def check_finite(self, source: Path, names: Watched) -> None:
        """Raise RewriterError where one of the tensors `names` in a file is not finite, once all of it was read."""
        self.sha256(source)
        for error, name, dtype in self._broken[source]:
            if names.get(name) == dtype:
                raise error

    def take(self, source: Path, target: Path) -> str:
        """Give the copy of `source` the name `target`, once all of it is on the disk; returns its sha256."""
        digest = self.sha256(source)
        with self._files.pop(source) as file:
            os.fsync(file.fileno())
            # That a directory is given makes Python ask for what the link points to.
            os.link(f"/proc/self/fd/{file.fileno()}", target, src_dir_fd=file.fileno())
        return digest

    def nbytes(self) -> int:
        """Bytes of the disk that copies take which have no name yet."""
        return sum(512 * os.fstat(file.fileno()).st_blocks for file in self._files.values())


def begun_copies(
    model: str | os.PathLike[str], out: str | os.PathLike[str] | None, link: bool
) -> AbstractContextManager[EarlyCopies | None]:
    """Copies of a local model's weights for a conversion to a new `out`; with `link` they are hashed only."""
    if not Path(model).is_dir():
        return nullcontext()
    place = Path.cwd() / "out" if out is None else Path(out)
    if out is not None and os.path.lexists(place):
        return nullcontext()
    return EarlyCopies.begin(model, place, link) or nullcontext()


def kept_copies(early: EarlyCopies | None, copies: Iterable[tuple[Path, str]]) -> EarlyCopies | None:
    """`early`, if `copies` (source, name) of the output that was planned hold all that it copies; else it ends, and
    None."""
    if early is None or {source for source, _ in copies}.issuperset(early.sources):
        return early
    early.stop()
    return None

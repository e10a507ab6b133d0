"""Copies that begin before it is known whether they are wanted: in files without a name, of which nothing can stay.

What a conversion copies is nearly always the checkpoint's files as they are. Whether that is so is known when the model
is traced, and whether it is kept when it is verified: the disk would stand idle until then.
"""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from rewriter.common.errors import RewriterError
from rewriter.weights.checkpoint import Checkpoint
from rewriter.weights.finite import NotFinite, Watched, looked_at
from rewriter.weights.sink import BUFFER, Sink, reflink_into, unnamed
from rewriter.weights.space import available, existing
from rewriter.weights.streams import Stream, StreamRun, file_pieces, processors

SWITCH_SECONDS = 5e-4  # a thread that copies waits so long for the one that imports or traces, several times a buffer


class EarlyCopies:
    """The weight files of a checkpoint, copied and hashed by threads of this process while it does other things.

    A context manager. Copies lie in the file system of `directory`, without a name until `take` gives them one; leaving
    the block, as the end of the process, frees those that were not taken. Without a directory files are only hashed.
    Raises OSError where the file system has no files without names.
    """

    def __init__(self, checkpoint: Checkpoint, directory: Path | None) -> None:
        self.sources = checkpoint.files
        self._files: dict[Path, int] = {}
        self._sha256: dict[Path, Future[str]] = {source: Future() for source in self.sources}
        self._broken: dict[Path, list[NotFinite]] = {source: [] for source in self.sources}
        streams = []
        try:
            for source in self.sources:
                sink = None
                if directory is not None:
                    fd = self._files[source] = unnamed(directory)
                    if not reflink_into(fd, source):
                        sink = partial(_duplicate, source, fd)
                tensors = checkpoint.headers[source].tensors
                as_scales = {n: replace(i, dtype="F8_E8M0") for n, i in tensors.items() if i.dtype == "U8"}
                pieces = file_pieces(source, size=BUFFER)
                pieces = looked_at(pieces, source, {**tensors, **as_scales}, self._broken[source].append)
                streams.append(Stream(source, 0, pieces, sink))
        except BaseException:
            self._close()
            raise
        self._run = StreamRun(checkpoint, streams, lambda source, digest: self._sha256[source].set_result(digest))
        self._thread = threading.Thread(target=self._copy, name="early copies", daemon=True)

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
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End all copying and free what was not taken."""
        self._run.stop()
        self._thread.join()
        self._close()

    def sha256(self, source: Path) -> str:
        """The hash of a file, once all of it was read. Raises what stopped the copying."""
        return self._sha256[source].result()

    def check_finite(self, source: Path, names: Watched) -> None:
        """Raise RewriterError where one of the tensors `names` in a file is not finite, once all of it was read."""
        self.sha256(source)
        for what in self._broken[source]:
            if names.get(what.name) == what.dtype:
                raise what.error(source)

    def take(self, source: Path, target: Path) -> str:
        """Give the copy of `source` the name `target`, once all of it is on the disk; returns its sha256."""
        digest, fd = self.sha256(source), self._files.pop(source)
        try:
            os.fsync(fd)
            # That a directory is given makes Python ask for what the link points to.
            os.link(f"/proc/self/fd/{fd}", target, src_dir_fd=fd)
        finally:
            os.close(fd)
        return digest

    def nbytes(self) -> int:
        """Bytes of the disk that copies take which have no name yet."""
        return sum(512 * os.fstat(fd).st_blocks for fd in self._files.values())

    def _copy(self) -> None:
        try:
            self._run.run(processors())
        except BaseException as error:
            for digest in self._sha256.values():
                if not digest.done():
                    digest.set_exception(error)
        finally:
            sys.setswitchinterval(self._interval)

    def _close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])


def _duplicate(source: Path, fd: int) -> Sink:
    return Sink(source, os.dup(fd))

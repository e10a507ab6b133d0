"""Outputs that walk through one source together: each is filled and hashed by one thread at a time, written by others.

A `Stream` is one output, made of pieces. `StreamRun` advances many: its threads always advance the stream that is
furthest behind in the source, so the source is read from the disk once, for any number of outputs.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rewriter.common.errors import RewriterError
from rewriter.weights.checkpoint import Checkpoint
from rewriter.weights.sink import ALIGNMENT, BUFFER, Sink, WriteBehind

# How far, in bytes of source, one output may run ahead of another, and how much of the source may be mapped at a time.
WINDOW = 256 << 20
PIECE = 1 << 20
Finished = Callable[[Path, str], None]


@dataclass(frozen=True)
class StreamPiece:
    """`nbytes` of an output; `write` puts them into memory of that size.

    `position` is about the place in the source that they come from, `mapped` how many bytes of mapped files are
    touched.
    """

    nbytes: int
    position: int
    mapped: int
    write: Callable[[memoryview], None]


class Stream:
    """One output: its pieces, taken by one thread at a time, a buffer at once; written by other threads.

    `sink` opens the file that they go to; None: they are only hashed.
    """

    def __init__(
        self, path: Path, position: int, pieces: Iterator[StreamPiece], sink: Callable[[], Sink] | None
    ) -> None:
        self.path = path
        self.position = position
        self.mapped = 0
        self.busy = False
        self.done = False
        self.digest = hashlib.sha256()
        self._pieces = pieces
        self._open = sink
        self._next: StreamPiece | None = None
        self._begun = False
        self._sink: Sink | None = None
        self._carry = b""
        self._offset = 0
        self._lock = threading.Lock()
        self._open_writes = 1  # the reading itself counts as one

    def step(self, behind: WriteBehind, complete: Callable[[Stream], None]) -> None:
        """Fill, hash and hand on one buffer. `complete` is called on a writing thread once the file is on the disk."""
        if not self._begun:  # only now is any file opened: there may be hundreds
            self._begun = True
            self._sink = self._open() if self._open is not None else None
            self._advance()
        buffer = behind.buffer()
        try:
            filled = len(self._carry)
            buffer[:filled] = self._carry
            while self._next is not None and filled + self._next.nbytes <= BUFFER:
                part = buffer[filled : filled + self._next.nbytes]
                self._next.write(part)
                self.digest.update(part)
                filled += len(part)
                self.mapped += self._next.mapped
                self._advance()
            self.done = self._next is None
            # O_DIRECT writes whole blocks: the rest starts the next buffer.
            whole = filled - filled % ALIGNMENT
            self._carry = bytes(buffer[whole:filled])
        except BaseException:
            behind.release(buffer)
            raise
        offset, self._offset = self._offset, self._offset + whole
        with self._lock:
            self._open_writes += 1
        behind.submit(lambda: self._written(buffer[:whole], offset, complete), buffer)
        if self.done:
            behind.submit(lambda: self._written(None, 0, complete))

    def close(self) -> None:
        """Close the file as it is, and the source. No thread is in `step`."""
        if self._sink is not None:
            self._sink.close()
        if isinstance(self._pieces, Generator):
            self._pieces.close()

    def _advance(self) -> None:
        self._next = next(self._pieces, None)
        if self._next is not None:
            self.position = max(self.position, self._next.position)

    def _written(self, data: memoryview | None, offset: int, complete: Callable[[Stream], None]) -> None:
        if data is not None and self._sink is not None:
            self._sink.write(data, offset)
        with self._lock:
            self._open_writes -= 1
            last = self._open_writes == 0
        if last:
            if self._sink is not None:
                self._sink.finish(self._carry, self._offset)
            complete(self)


class StreamRun:
    """All streams, advanced together, none further than `window` ahead of another. One object, one run."""

    def __init__(
        self, checkpoint: Checkpoint, streams: Sequence[Stream], finished: Finished | None, window: float = WINDOW
    ) -> None:
        self._checkpoint = checkpoint
        self._window = window
        self._streams = streams
        self._finished = finished
        self._turn = threading.Condition()
        self._error: BaseException | None = None
        self._hashes: dict[Path, str] = {}
        self._mapped = 0

    def stop(self) -> None:
        """Make `run` raise InterruptedError soon. From another thread."""
        self._fail(InterruptedError())

    def run(self, workers: int) -> dict[Path, str]:
        behind = WriteBehind(count=workers + 8, threads=2, failed=self._fail)
        pool = ThreadPoolExecutor(workers, "read")
        try:
            for _ in range(workers):
                pool.submit(self._work, behind)
            pool.shutdown()
        except BaseException as error:  # Ctrl-C reaches only this thread
            self._fail(error)
            raise
        finally:
            pool.shutdown()
            behind.close()
            for stream in self._streams:
                stream.close()
        if self._error is not None:
            raise self._error
        return {stream.path: self._hashes[stream.path] for stream in self._streams}

    def _work(self, behind: WriteBehind) -> None:
        while (stream := self._take()) is not None:
            try:
                stream.step(behind, self._complete)
            except BaseException as error:
                self._fail(error)
            with self._turn:
                stream.busy = False
                self._mapped += stream.mapped
                stream.mapped = 0
                if self._mapped > WINDOW:
                    self._mapped = 0
                    self._checkpoint.release()
                self._turn.notify_all()

    def _take(self) -> Stream | None:
        """The idle stream that is furthest behind; None when all are done or one failed."""
        with self._turn:
            while True:
                open_ = [stream for stream in self._streams if not stream.done]
                if self._error is not None or not open_:
                    return None
                behind = min(stream.position for stream in open_)
                idle = [stream for stream in open_ if not stream.busy]
                first = min(idle, key=lambda stream: stream.position, default=None)
                if first is not None and first.position <= behind + self._window:
                    first.busy = True
                    return first
                self._turn.wait()

    def _complete(self, stream: Stream) -> None:
        with self._turn:
            digest = self._hashes[stream.path] = stream.digest.hexdigest()
            if self._finished is not None:
                self._finished(stream.path, digest)

    def _fail(self, error: BaseException) -> None:
        with self._turn:
            self._error = self._error or error
            self._turn.notify_all()


def file_pieces(path: Path, place: int = 0, size: int = PIECE) -> Iterator[StreamPiece]:
    """A file's bytes, in pieces of at most `size`; the first is at `place` in the source.

    Reading one raises RewriterError where the file has become shorter.
    """
    with open(path, "rb", buffering=0) as file:
        total = os.fstat(file.fileno()).st_size

        def read(offset: int, target: memoryview) -> None:
            while target:
                count = os.preadv(file.fileno(), [target], offset)
                if count == 0:
                    raise RewriterError(
                        f"{path}: it became shorter while being copied. Run again when nothing writes to it."
                    )
                target, offset = target[count:], offset + count

        for offset in range(0, total, size):
            yield StreamPiece(min(size, total - offset), place + offset, 0, partial(read, offset))


def processors() -> int:
    """How many threads are worth having: what this process may use, which in a container is less than there is."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, count)

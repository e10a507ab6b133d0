"""Copies that begin before it is known what else will be written, in a process of their own.

Importing torch and tracing a model keep one processor busy for some seconds, in which the unchanged weight files can
already be copied and hashed. The copies are files without a name (O_TMPFILE) in the file system of the output: they get
one when they are taken, and whatever happens before that, even kill -9, leaves nothing behind.
"""

from __future__ import annotations

import hashlib
import os
import select
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from rewriter.common.errors import RewriterError
from rewriter.weights.checkpoint import Checkpoint
from rewriter.weights.sink import BUFFER, O_DIRECT, Sink, WriteBehind, reflink_into
from rewriter.weights.space import available

O_TMPFILE: int = getattr(os, "O_TMPFILE", 0)
WORTHWHILE = 1_000_000_000  # bytes of weights below which a process of its own takes longer than it saves


class Ahead:
    """A context manager: inside, `files` are copied one after the other until `stop`, then `take` names the copies.

    `place` is any path in the file system of the output, which need not exist. Where that has no unnamed files, nothing
    is copied and `take` always answers None. Leaving the block ends everything; what was not taken vanishes.
    """

    def __init__(self, place: Path, files: Sequence[Path]) -> None:
        self._place, self._files = place, list(files)
        self._fds: list[int] = []
        self._seen: list[tuple[int, int]] = []
        self._begun: set[int] = set()
        self._digests: dict[int, str] = {}
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        if self._files and O_TMPFILE and hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) > 1:
            try:
                self._start()
            except OSError:  # no unnamed files there, no more processes: a help that is not needed
                self._end()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def stop(self) -> set[Path]:
        """Begin no further file; returns those that `take` can be asked for. It goes on with the one under way."""
        if self._process is not None:
            self._say("stop\n")
            self._listen(until="stopped")
        return {self._files[i] for i in self._begun}

    def take(self, source: Path, target: Path) -> str | None:
        """Give the copy of `source` the new name `target`: its sha256, once it is complete and on the disk.

        None if there is no such copy, or the source is not what it was when the copy began: then it must be made.
        """
        index = self._files.index(source) if source in self._files else -1
        if index not in self._begun:
            return None
        self._listen(until=f"done {index} ")
        digest = self._digests.get(index)
        if digest is None or _signature(source) != self._seen[index]:
            return None
        directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # Only with a directory does Python follow the link in /proc to the file itself.
            os.link(f"/proc/self/fd/{self._fds[index]}", target.name, dst_dir_fd=directory, follow_symlinks=True)
        except OSError:
            return None
        finally:
            os.close(directory)
        return digest

    def _start(self) -> None:
        parent = _existing(self._place)
        for file in self._files:
            self._seen.append(_signature(file))
            self._fds.append(_unnamed(parent))
        package = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        pairs = [f"{fd}:{file}" for fd, file in zip(self._fds, self._files, strict=True)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rewriter.weights.ahead", *pairs],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=self._fds,
            text=True,
        )

    def _say(self, text: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(text)
            self._process.stdin.flush()
        except BrokenPipeError:  # it has finished, or failed
            pass

    def _listen(self, until: str) -> None:
        """Take in what the process says, up to a line that begins so, or to its end."""
        kind, _, rest = until.strip().partition(" ")
        if kind == "done" and int(rest) in self._digests:
            return
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            word, *values = line.split()
            if word == "begin":
                self._begun.add(int(values[0]))
            elif word == "done":
                self._digests[int(values[0])] = values[1]
            if line.startswith(until):
                return

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
        for fd in self._fds:
            os.close(fd)
        self._fds, self._begun = [], set()


def copies_ahead(model: str | os.PathLike[str], place: Path, wanted: bool) -> Ahead:
    """The `Ahead` for a conversion of `model` to `place`: of its weight files if that is `wanted` and worth while.

    Raises nothing: whatever is wrong with the model is said by who opens it.
    """
    nothing = Ahead(place, [])
    if not wanted or not Path(model).is_dir():
        return nothing
    try:
        checkpoint = Checkpoint.open(model)
        total = sum(file.stat().st_size for file in checkpoint.files)
        # The copies and as much again for the ranks: a disk that is too small is refused before it is filled.
        if total < WORTHWHILE or available(place) < 2.5 * total:
            return nothing
        if _reflinks(checkpoint.files[0], place):
            return nothing  # sharing the data costs less than any copy
    except (OSError, RewriterError):
        return nothing
    return Ahead(place, checkpoint.files)


def _reflinks(source: Path, place: Path) -> bool:
    """Whether a file in `place` could share the data of `source`."""
    probe = _unnamed(_existing(place))
    try:
        return reflink_into(probe, source.resolve(strict=True))
    finally:
        os.close(probe)


def _existing(place: Path) -> Path:
    """The nearest directory that is there already: what is to be in `place` lies on its file system."""
    while not place.is_dir():
        place = place.parent
    return place


def _unnamed(directory: Path) -> int:
    flags = O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(directory, flags | O_DIRECT, 0o666)
    except OSError:
        return os.open(directory, flags, 0o666)


def _signature(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns


# --- in the process of its own ---


def main(pairs: Sequence[str]) -> None:
    """Copy each FD:FILE of `pairs`, say "begin I" and "done I SHA256", end after "stop" or when the parent is gone."""
    stopping = False

    def listen() -> None:
        nonlocal stopping
        while not stopping and select.select([0], [], [], 0)[0]:
            if not os.read(0, 100):
                os._exit(1)  # the parent is gone, and with it every use for a copy
            stopping = True
            print("stopped", flush=True)  # noqa: T201 - the parent reads it

    for index, pair in enumerate(pairs):
        listen()
        if stopping:
            return
        fd, _, source = pair.partition(":")
        print("begin", index, flush=True)  # noqa: T201
        print("done", index, _copy(Path(source), int(fd), listen), flush=True)  # noqa: T201


def _copy(source: Path, fd: int, between: Callable[[], None]) -> str:
    """Copy a file into an open one, call `between` after each buffer; returns the sha256, with the data on the disk."""
    failures: list[BaseException] = []
    digest, offset, rest = hashlib.sha256(), 0, b""
    sink = Sink(source, fd)
    behind = WriteBehind(count=8, threads=2, failed=failures.append)
    try:
        with open(source, "rb", buffering=0) as file:
            while not failures:
                buffer = behind.buffer()
                count = _fill(file.fileno(), buffer, offset)
                digest.update(buffer[:count])
                if count < BUFFER:
                    rest = bytes(buffer[:count])
                    behind.release(buffer)
                    break
                behind.submit(partial(sink.write, buffer, offset), buffer)
                offset += count
                between()
    finally:
        behind.close()
    if failures:
        raise failures[0]
    sink.finish(rest, offset)
    return digest.hexdigest()


def _fill(fd: int, buffer: memoryview, offset: int) -> int:
    filled = 0
    while filled < len(buffer) and (count := os.preadv(fd, [buffer[filled:]], offset + filled)):
        filled += count
    return filled


if __name__ == "__main__":
    main(sys.argv[1:])

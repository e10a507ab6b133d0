"""The output directory: written next to its final place, renamed when complete, resumed when interrupted.

While a run is under way, NAME's files are in `.NAME.rewriting`, and `.NAME.rewriting.journal` says which job writes
there and which files are finished. The journal is also the lock that keeps two runs apart, and the proof that the
staging directory is ours: without it nothing is deleted. The order at the end is: every file on the disk, the
manifest, the rename, then the journal goes. Whatever moment the power fails at, NAME is either absent or complete.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

from rewriter.common.errors import RewriterError
from rewriter.output.names import MANIFEST
from rewriter.weights.space import disk_full, require_space


class OutputDirectory:
    """A context manager around writing one output directory.

    Inside, files are made at `path(name)` and then made known by `record(path, sha256)`, or written in one call by
    `write(name, data)`. `manifest(table)` comes last. Leaving the block renames the directory to its final place.

    Leaving it by an exception deletes what was staged, except by an interruption (Ctrl-C, as kill -9): then a later
    run of the same `job` with `resume` continues, and `finished(name)` answers for files that are done. `job` is what
    must be equal for that: JSON values by name, compared one by one (source fingerprint, recipe, tp, dtype, versions,
    …). With `resume`, `complete` says that the final directory already holds this job's result; nothing is to be
    written then.

    Raises RewriterError if the final place is taken (a directory that is not ours is never touched), if another run
    writes there, if the interrupted job differs, or if the disk is full.
    """

    def __init__(
        self, final: str | os.PathLike[str], resume: bool = False, job: Mapping[str, Any] | None = None
    ) -> None:
        # The real place: a rename onto a symlink would replace the link.
        self.final = Path(os.path.realpath(final))
        if not self.final.name:
            raise RewriterError(f"{final}: not a place for an output directory. Choose another --out.")
        self.staging = self.final.with_name(f".{self.final.name}.rewriting")
        self.journal = self.final.with_name(f".{self.final.name}.rewriting.journal")
        self.resume = resume
        self.job: dict[str, Any] = json.loads(json.dumps(dict(job or {})))
        self.complete = False
        self.files: dict[str, tuple[int, str]] = {}
        self._journal_fd = -1
        self._needed: int | None = None
        self._has_manifest = False

    def __enter__(self) -> OutputDirectory:
        try:
            self.final.parent.mkdir(parents=True, exist_ok=True)
            self._lock()
            try:
                self._begin()
            except BaseException:
                self._unlock()
                raise
        except OSError as error:
            raise self._explained(error) or error from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.complete:
            self._unlock()
        elif error is not None:
            self._abandon(error)
        else:
            try:
                self._commit()
            except BaseException as failure:
                self._abandon(failure)
                raise

    def require_space(self, nbytes: int) -> None:
        """Raise RewriterError unless `nbytes` more, all that will be written, fit on the disk."""
        self._needed = nbytes
        require_space(self.staging, nbytes)

    def path(self, name: str) -> Path:
        """The place to write the file `name` (a relative path with '/') to; its directory exists afterwards."""
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts or str(pure) == MANIFEST:
            raise RewriterError(f"{name!r}: not the name of a file inside {self.final}.")
        path = self.staging / pure
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def write(self, name: str, data: str | bytes) -> str:
        """Write a small file onto the disk; returns its sha256."""
        return self._written(self.path(name), data.encode() if isinstance(data, str) else data)

    def _written(self, path: Path, data: bytes) -> str:
        write_to_disk(path, data)
        digest = hashlib.sha256(data).hexdigest()
        self.record(path, digest)
        return digest

    def record(self, path: Path, sha256: str) -> None:
        """Make a file known that is complete and on the disk, as `convert_files(finished=…)` reports it."""
        name = path.relative_to(self.staging).as_posix()
        size = path.stat().st_size
        self.files[name] = (size, sha256)
        self._append({"file": name, "size": size, "sha256": sha256})

    def finished(self, name: str) -> str | None:
        """The sha256 of a file that the interrupted run had finished and that still is what it was; None: write it."""
        return self.files[name][1] if name in self.files else None

    def hashes(self) -> dict[str, str]:
        """The sha256 of every file by name, without the manifest's."""
        return {name: digest for name, (_, digest) in sorted(self.files.items()) if name != MANIFEST}

    def manifest(self, table: Mapping[str, Any]) -> None:
        """Write the manifest, the last file. The job is added under "job": by it a finished output is recognised."""
        text = json.dumps({**table, "job": self.job}, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        self._has_manifest = True
        self._written(self.staging / MANIFEST, text.encode())

    # Beginning and end

    def _lock(self) -> None:
        """Own the journal, which is made if it is missing. Raises RewriterError if another run holds it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._journal_fd = os.open(self.journal, flags, 0o666)
        try:
            fcntl.flock(self._journal_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._unlock()
            raise RewriterError(
                f"{self.final}: another run is writing there. Wait for it, or choose another --out."
            ) from error

    def _unlock(self, delete: bool = False) -> None:
        if self._journal_fd < 0:
            return
        if delete:
            self.journal.unlink(missing_ok=True)
        os.close(self._journal_fd)
        self._journal_fd = -1

    def _begin(self) -> None:
        earlier, length = self._read_journal()
        if self._final_is_taken():
            self._unlock(delete=earlier is None or not self.staging.exists())
            return
        if self.staging.exists():
            if earlier is None:
                self._unlock(delete=True)
                raise RewriterError(
                    f"{self.staging}: exists, and no journal says that an interrupted run left it, so it is not "
                    "touched. Move it away, or choose another --out."
                )
            job, files = earlier
            if self.resume:
                self._check_job(job)
                self._keep_finished(files)
                os.ftruncate(self._journal_fd, length)
                return
            shutil.rmtree(self.staging)
        # The journal says whose the staging directory is before that exists.
        os.ftruncate(self._journal_fd, 0)
        self._append({"job": self.job})
        sync_directory(self.final.parent)
        self.staging.mkdir()

    def _final_is_taken(self) -> bool:
        """True if it already holds this job's result (only with resume); False if it is free; else RewriterError."""
        reason = taken(self.final)
        if reason is None:
            return False
        if self.resume and (self.final / MANIFEST).is_file():
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                self.complete = json.loads((self.final / MANIFEST).read_bytes())["job"] == self.job
        if not self.complete:
            if not self.staging.exists():
                self._unlock(delete=True)
            raise RewriterError(reason)
        return True

    def _read_journal(self) -> tuple[tuple[dict[str, Any], dict[str, tuple[int, str]]] | None, int]:
        """The job and finished files of the run before this one (None: it is new), and the journal's valid length."""
        data = os.pread(self._journal_fd, os.fstat(self._journal_fd).st_size, 0)
        job: dict[str, Any] | None = None
        files = {}
        length = 0
        for line in data.splitlines(keepends=True):
            try:
                entry = json.loads(line)
                if not line.endswith(b"\n"):
                    break  # it was being written when the power failed
                if job is None:
                    job = dict(entry["job"])
                else:
                    files[str(entry["file"])] = (int(entry["size"]), str(entry["sha256"]))
            except (ValueError, KeyError, TypeError):
                break
            length += len(line)
        if job is None and data.startswith(b'{"job": ') and not self.staging.exists():
            data = b""  # its first line was being written: nothing is staged yet
        if job is None and data:
            raise RewriterError(f"{self.journal}: is not a journal of rewriter. Move it away, or choose another --out.")
        return (None if job is None else (job, files)), length

    def _check_job(self, earlier: Mapping[str, Any]) -> None:
        for key in dict.fromkeys([*earlier, *self.job]):
            was, now = (repr(job[key]) if key in job else "not set" for job in (earlier, self.job))
            if was != now:
                raise RewriterError(
                    f"--resume: the interrupted run that left {self.staging} had {key} {was}, this one has "
                    f"{now}. Repeat it with the same options, or start over without --resume."
                )

    def _keep_finished(self, files: Mapping[str, tuple[int, str]]) -> None:
        """Take over the files that still are what the journal says; delete all others."""
        for name, (size, digest) in files.items():
            path = self.staging / name
            if name != MANIFEST and path.is_file() and path.stat().st_size == size and sha256_of(path) == digest:
                self.files[name] = (size, digest)
        for path in self.staging.rglob("*"):
            if not path.is_dir() and path.relative_to(self.staging).as_posix() not in self.files:
                path.unlink()

    def _append(self, entry: Mapping[str, Any]) -> None:
        os.lseek(self._journal_fd, 0, os.SEEK_END)
        line = json.dumps(entry, ensure_ascii=False).encode() + b"\n"
        if os.write(self._journal_fd, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.journal))
        os.fsync(self._journal_fd)

    def _commit(self) -> None:
        if not self._has_manifest:
            raise RuntimeError(f"{self.final}: the output was left without a manifest")
        for root, _, _ in os.walk(self.staging):
            sync_directory(Path(root))
        try:
            os.rename(self.staging, self.final)  # replaces an empty directory, refuses any other
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise RewriterError(
                    f"{self.final}: something else was written there meanwhile, and it is not touched. "
                    "Choose another --out."
                ) from error
            raise
        sync_directory(self.final.parent)
        self._unlock(delete=True)

    def _abandon(self, error: BaseException) -> None:
        """After a failure nothing stays, after an interruption everything. RewriterError in place of a full disk's."""
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            self._unlock()
            return
        explained = self._explained(error) if isinstance(error, OSError) else None
        if self._journal_fd >= 0:
            # Only what this run made or took over: `_begin` refused any other staging directory.
            shutil.rmtree(self.staging, ignore_errors=True)
            self._unlock(delete=True)
        if explained is not None:
            raise explained from error

    def _explained(self, error: OSError) -> RewriterError | None:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return disk_full(self.final, self._needed)
        if error.filename:
            return RewriterError(f"{error.filename}: cannot be read or written: {error.strerror or error}.")
        return None


def taken(out: Path) -> str | None:
    """The reason why an output cannot be written at `out`; None where there is nothing, or an empty directory."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    what = "is a file"
    if (out / MANIFEST).is_file():
        what = "already holds an output of rewriter"
    elif out.is_dir():
        what = "exists, and is not an output of rewriter, so it is not touched"
    return f"{out}: {what}. Choose another --out, or delete it yourself."


def write_to_disk(path: Path, data: bytes) -> None:
    """Write a file, which is on the disk then."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

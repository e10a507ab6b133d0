"""Compiled decode steps in the user's cache: $XDG_CACHE_HOME/rewriter/decode-steps, by default below ~/.cache.

    KEY.json        which parts of a step are compiled, each with its file; written last
    GRAPH.so        a compiled part, by what it computes: layers, ranks and models share those that are equal
    KEY.spec.json   what is being compiled, KEY.log: what was said meanwhile; both go once it is done
    KEY.failed      why it could not be compiled

A key is a hash of all that compiled code depends on, so that nothing ever becomes stale: what has changed has another
key, and the least recently used steps are removed. The folder may be removed at any time. Files appear whole, by a
rename. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rewriter.common.errors import RewriterError
from rewriter.common.packages import PACKAGE_PARENT
from rewriter.common.processes import environment, write_json

WORKER = ["-m", "rewriter.runtime.generation.compile_worker"]
KEPT = 64  # steps, of a few MB each
_SHORT_LIVED, _DAY = (".spec.json", ".log", ".failed", ".partial"), 86_400  # seconds
_COMPUTING = ("ir", "kernels", "runtime")  # rooms whose code is in a compiled step


def cache_folder() -> Path:
    """Folder of the cache, made or not. Raises RewriterError where others can write to it: its files are code that this
    process runs."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    except RuntimeError as error:
        raise RewriterError(f"no cache for compiled decode steps: {error} Set XDG_CACHE_HOME to a folder") from error
    folder = base / "rewriter" / "decode-steps"
    for place in (folder, folder.parent):  # who can write to the one above could put another in its place
        with suppress(OSError):
            status = place.stat()
            others = stat.S_IWOTH | (stat.S_IWGRP if place == folder else 0)  # groups of one user are common
            if status.st_uid not in (os.getuid(), 0) or status.st_mode & others:
                raise RewriterError(f"{place}: other users can write to it. Make it your own (chmod 700), or remove it")
    return folder


def made(folder: Path) -> None:
    """Make the cache, if it is not there. Raises RewriterError where it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RewriterError(f"no cache for compiled decode steps: {error}. Set XDG_CACHE_HOME to a folder") from error


def key_of(parts: Mapping[str, Any]) -> str:
    """The key of `parts`, JSON values, on this machine: by its processor, Python, and the code of the runtime."""
    runtime = hashlib.sha256()
    for room in _COMPUTING:
        for path in sorted((PACKAGE_PARENT / "rewriter" / room).rglob("*.py")):
            runtime.update(path.relative_to(PACKAGE_PARENT).as_posix().encode() + b"\0" + path.read_bytes())
    here = {"processor": _processor(), "python": platform.python_version(), "runtime": runtime.hexdigest()}
    return hashlib.sha256(json.dumps([here, parts], sort_keys=True).encode()).hexdigest()[:32]


def _processor() -> list[str]:
    """Model and instruction sets: what is compiled for one may be no code of another."""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
        return [platform.machine(), *re.findall(r"(?m)^(?:model name|flags|Features|CPU part)\s*:\s*(.*)$", text)]
    return [platform.machine(), platform.processor()]


def find(folder: Path, key: str) -> dict[str, tuple[Path, bool]] | None:
    """By part its file, and whether it returns one tensor; None where the step is not compiled.

    One with a file that is not as it was written is removed.
    """
    index = folder / f"{key}.json"
    try:
        said = json.loads(index.read_text(encoding="utf-8"))
        for name, digest in said["files"].items():
            if hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
                raise ValueError(name)
        with suppress(OSError):  # a cache that is read only
            os.utime(index)
        return {part: (folder / name, bool(single)) for part, (name, single) in said["parts"].items()}
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        with suppress(OSError):
            index.unlink()
    return None


def compiler() -> str | None:
    """The C++ compiler that compiles steps: by itself TorchInductor takes $CXX or g++ alone."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    return next((name for name in names if shutil.which(name)), None)


def start_compiling(folder: Path, key: str, spec: Mapping[str, Any], *, background: bool) -> subprocess.Popen[bytes]:
    """A process that compiles the step of `key`, for which one process of this user at a time does so.

    In the background it has another session, in which it goes on when this process ends, and gives way to all
    others.
    """
    (folder / f"{key}.failed").unlink(missing_ok=True)
    write_json(folder / f"{key}.spec.json", {**spec, "folder": str(folder), "key": key})
    words = ["background"] if background else []
    command = [sys.executable, *WORKER, str(folder / f"{key}.spec.json"), *words]
    own = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # more would be processes that wait
    if (program := compiler()) is not None:
        own["CXX"] = program
    with (folder / f"{key}.log").open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=background,
            env=environment(**own),
        )


def failure(folder: Path, key: str) -> str | None:
    """Reason why `key` could not be compiled; None where nobody tried, or who did was killed."""
    with suppress(OSError):
        return (folder / f"{key}.failed").read_text(encoding="utf-8", errors="replace")
    return None


# --- in the process that compiles ---


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Within it no other process writes to the cache. What killed ones left is removed."""
    import fcntl

    with (folder / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for path in folder.glob("partial-*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in (path for ending in _SHORT_LIVED for path in folder.glob(f"*{ending}")):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < time.time() - _DAY:
                    path.unlink()
        yield


def store(folder: Path, key: str, parts: Mapping[str, tuple[str, bool]], seconds: float) -> None:
    """Make the step of `key` one of those files, and remove the steps that were used least recently."""
    names = sorted({name for name, _ in parts.values()})
    files = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
    write_json(folder / f"{key}.json", {"parts": parts, "files": files, "seconds": seconds})
    for ending in _SHORT_LIVED:
        (folder / f"{key}{ending}").unlink(missing_ok=True)
    indices = [path for path in folder.glob("*.json") if not path.name.endswith(".spec.json")]
    indices.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in indices[KEPT:]:
        path.unlink()
    used = set(names)
    for path in indices[:KEPT]:
        with suppress(ValueError, KeyError, TypeError):  # one that is damaged, which `find` removes
            used |= {*json.loads(path.read_text(encoding="utf-8"))["files"]}
    for path in folder.glob("*.so"):
        if path.name not in used:
            path.unlink()

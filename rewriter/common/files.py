"""Files that users name or give: read with every fault in words, written at once."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from rewriter.common.errors import RewriterError, VerificationError

MAX_DEPTH = 64  # levels of a JSON file; code that walks through it calls itself as often
MOST_TEXT = 256 << 20  # bytes of a file of prompts, or of text to measure on


def name_of(path: str | os.PathLike[str]) -> str:
    """The last part of a path, of `.` and `..` too that of the folder that they are."""
    return os.path.basename(os.path.abspath(path))


def require_place(path: Path, option: str, more_beside: bool = False) -> None:
    """Refuse what cannot be written, before any work is done for it: directories, disks, and where `more_beside` says
    that more is written beside it, all but files. Raises RewriterError."""
    if path.is_dir() or not path.parent.is_dir():
        what = "it is a directory" if path.is_dir() else f"there is no directory {path.parent}"
        raise RewriterError(f"{option} {path}: {what}. Name a file in a directory that exists.")
    if path.is_block_device() or path.is_socket() or (more_beside and _is_stream(path)):
        raise RewriterError(f"{option} {path}: it is not a file, and stays as it is. Name a file.")


def write_text(path: Path, text: str, option: str) -> None:
    """Put all of `text` at `path`, or nothing. Pipes and character devices, such as /dev/stdout, are written to; a link
    is followed. Raises RewriterError where that cannot be."""
    require_place(path, option)
    try:
        if _is_stream(path):
            number = _number(path)
            with open(path if number is None else os.dup(number), "w", encoding="utf-8") as stream:
                stream.write(text)
        else:
            _replace(Path(os.path.realpath(path)), text)
    except OSError as error:
        raise RewriterError(f"{option} {path}: cannot be written: {error.strerror or error}.") from None


def _is_stream(path: Path) -> bool:
    """What the process has open counts too: another file in its place would not be what its reader reads."""
    return _number(path) is not None or path.is_char_device() or path.is_fifo()


def _number(path: Path) -> int | None:
    """Of /dev/stdout and its like, the number of what is open. Opened again, a file would be written from its start."""
    name = os.path.abspath(path)
    if name in (known := {"/dev/stdout": 1, "/dev/stderr": 2}):
        return known[name]
    found = re.fullmatch(r"/(?:dev|proc/self)/fd/(\d{1,9})", name)
    return int(found[1]) if found else None


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_given(option: str, path: Path, hint: str) -> str:
    """The text of a file or pipe that an option names, without a byte order mark. `hint` is the next step.

    Raises RewriterError where it is neither, is larger than 256 MiB, holds nothing, or is not UTF-8.
    """
    try:
        mode = os.stat(path).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise RewriterError(f"{option} {path}: neither a file nor a pipe. {hint}")
        with path.open("rb") as file:
            data = file.read(MOST_TEXT + 1)
        text = data.decode("utf-8-sig") if len(data) <= MOST_TEXT else ""
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise RewriterError(f"{option} {path}: {reason}. {hint}") from None
    if not text.strip():
        wrong = "it is empty" if len(data) <= MOST_TEXT else f"larger than {MOST_TEXT >> 20} MiB"
        raise RewriterError(f"{option} {path}: {wrong}. {hint}")
    return text


def read_json(path: Path, hint: str) -> dict[str, Any]:
    """The object that a JSON file holds. `hint` is the next step for who has a broken one.

    Raises RewriterError, naming the file, where it cannot be read, is no regular file, no UTF-8, no JSON or no object,
    or is nested deeper than 64 levels.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise RewriterError(f"{path}: not a regular file. {hint}")
        data = json.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise RewriterError(f"{path}: cannot be read: {error.strerror or error}. {hint}") from error
    except UnicodeDecodeError as error:
        raise RewriterError(f"{path}: not UTF-8 text (byte {error.start}). {hint}") from error
    except RecursionError as error:
        raise RewriterError(f"{path}: nested deeper than {MAX_DEPTH} levels. {hint}") from error
    except ValueError as error:
        raise RewriterError(f"{path}: not valid JSON ({error}). {hint}") from error
    if not isinstance(data, dict):
        raise RewriterError(f"{path}: it holds a {type(data).__name__}, not an object. {hint}")
    if _is_deeper(data, MAX_DEPTH):
        raise RewriterError(f"{path}: nested deeper than {MAX_DEPTH} levels. {hint}")
    return data


def _is_deeper(data: Any, levels: int) -> bool:
    inside = [data]
    for _ in range(levels):
        inside = [
            child
            for value in inside
            for child in (value.values() if isinstance(value, dict) else value)
            if isinstance(child, dict | list)
        ]
    return bool(inside)


def check_sha256(path: Path, expected: str) -> None:
    """Compare the content of a file that `rewrite` wrote. Raises VerificationError where it is another, or missing."""
    try:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise VerificationError(f"{path}: missing, but the manifest names it. Rewrite the model again.") from None
    except OSError as error:
        raise VerificationError(f"{path}: cannot be read: {error.strerror}. Rewrite the model again.") from None
    if digest != expected:
        raise VerificationError(
            f"{path}: changed since it was written (sha256 {digest[:12]}…, the manifest says {expected[:12]}…). "
            "Rewrite the model again, or keep what was fine-tuned elsewhere."
        )

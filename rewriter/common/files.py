"""A file that an option names, written at once."""

from __future__ import annotations

import os
from pathlib import Path

from rewriter.common.errors import RewriterError


def require_place(path: Path, option: str) -> None:
    """Refuse a file that cannot be written, before any work is done for it. Raises RewriterError."""
    if path.is_dir() or not path.parent.is_dir():
        what = "it is a directory" if path.is_dir() else f"there is no directory {path.parent}"
        raise RewriterError(f"{option} {path}: {what}. Name a file in a directory that exists.")


def write_text(path: Path, text: str, option: str) -> None:
    """Put all of `text` at `path`, or nothing. Raises RewriterError where that cannot be."""
    require_place(path, option)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise RewriterError(f"{option} {path}: cannot be written: {error.strerror or error}.") from None
    finally:
        partial.unlink(missing_ok=True)

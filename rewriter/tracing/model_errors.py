"""Exceptions of a model's own code while it is traced, as sentences."""

from __future__ import annotations

import contextlib
import linecache
import traceback
from collections.abc import Iterator
from pathlib import Path

from rewriter.common.errors import RewriterError


def first_line(error: BaseException) -> str:
    """The type of an exception and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


@contextlib.contextmanager
def refused(what: str, hint: str = "") -> Iterator[None]:
    """In the block, every exception becomes a RewriterError: `what`, the exception, `hint`. RewriterErrors pass."""
    try:
        yield
    except RewriterError:
        raise
    except Exception as error:
        raise RewriterError(f"{what}: {first_line(error)}{hint}") from error


def reason_of(error: BaseException) -> str:
    """The type and text of an exception, with the line of the model's code that raised it."""
    while isinstance(error, RewriterError) and error.__cause__ is not None:
        error = error.__cause__
    said = first_line(error)
    if isinstance(error, RewriterError):
        said = said.partition(": ")[2]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name.startswith("model")]
    frames = [f for f in frames if Path(f.filename).name.startswith("modeling_")] or frames
    if not frames:
        return said
    code = (frames[-1].line or linecache.getline(frames[-1].filename, frames[-1].lineno or 0)).strip()
    return f"{said} ({Path(frames[-1].filename).name} line {frames[-1].lineno}: {code})"

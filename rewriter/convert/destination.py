"""Where an output may be written: refused before any work is done for it."""

from __future__ import annotations

import os
from pathlib import Path

from rewriter.common.errors import RewriterError
from rewriter.output.names import MANIFEST


def check_place(out: Path, source: str | os.PathLike[str] | None) -> None:
    """Raise RewriterError for a place that cannot be made, and for one within the model's directory `source`."""
    above = out.absolute().parent
    while not os.path.lexists(above):
        above = above.parent
    if not above.is_dir():
        raise RewriterError(f"{out}: {above} is not a directory. Choose another --out.")
    if source is not None and Path(source).is_dir() and above.resolve().is_relative_to(Path(source).resolve()):
        raise RewriterError(
            f"{out}: it lies within the model that is read, {source}, which stays as it is. Choose another --out."
        )


def check_free(out: Path, source: str | os.PathLike[str] | None = None) -> None:
    """Raise RewriterError as `check_place` does, and for a place that is taken.

    `OutputDirectory` decides; this only asks early.
    """
    check_place(out, source)
    if out.is_dir() and not any(out.iterdir()):
        return
    if os.path.lexists(out) and not (out.is_symlink() and not out.exists()):
        ours = (out / MANIFEST).is_file()
        what = (
            "already holds an output of rewriter"
            if ours
            else "exists, and is not an output of rewriter: it is not touched"
        )
        raise RewriterError(f"{out}: {what}. Choose another --out, or delete it yourself.")

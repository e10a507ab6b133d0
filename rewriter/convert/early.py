"""Copying while a model is imported, traced and verified. Imports no torch: in a program it begins before that is
there; the command imports torch first, to fork its server before there are threads."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rewriter.weights.early_copies import EarlyCopies

if TYPE_CHECKING:
    from rewriter.emit.files.output_files import PlannedFiles

# With these the output holds other weights than the source's, some are there already, or more room is needed.
_OTHERS = ("dtype", "dequantize", "drop_unused", "dry_run", "resume", "materialize")


def begun_copies(
    model: str | os.PathLike[str], *, out: str | os.PathLike[str] | None = None, link: bool = False, **options: Any
) -> AbstractContextManager[EarlyCopies | None]:
    """Copies of a local model's weights for a conversion with these options, if that is likely to want them."""
    if not Path(model).is_dir() or any(options.get(name) for name in _OTHERS):
        return nullcontext()
    place = Path.cwd() / "out" if out is None else Path(out)
    if out is not None and os.path.lexists(place):
        return nullcontext()
    return EarlyCopies.begin(model, place, link) or nullcontext()


def kept_copies(early: EarlyCopies | None, layout: PlannedFiles) -> EarlyCopies | None:
    """`early`, if the output that was planned holds all that it copies; else it ends, and None."""
    if early is None or {source for source, _ in layout.copies}.issuperset(early.sources):
        return early
    early.stop()
    return None

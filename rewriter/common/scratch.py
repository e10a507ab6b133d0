"""A folder of temporary files that goes with its block."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch_folder(what: str) -> Iterator[Path]:
    """A new folder for temporary files, called rewriter-WHAT-… in the system's directory for them."""
    with tempfile.TemporaryDirectory(prefix=f"rewriter-{what}-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)

"""A checkpoint as transformers wants it, where it lacks something that only transformers needs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rewriter.weights.checkpoint import INDEX, SINGLE


@contextmanager
def loadable(directory: str | os.PathLike[str]) -> Iterator[Path]:
    """`directory`, or links to its files beside an index with the `metadata` that transformers does not load without.

    The links are gone after the block.
    """
    root = Path(directory)
    index = root / INDEX
    said = json.loads(index.read_text(encoding="utf-8")) if index.is_file() and not (root / SINGLE).exists() else {}
    if not said or isinstance(said.get("metadata"), dict):
        yield root
        return
    with TemporaryDirectory(prefix="rewriter-") as scratch:
        for path in root.resolve().iterdir():
            if path.name != INDEX:
                Path(scratch, path.name).symlink_to(path)
        Path(scratch, INDEX).write_text(json.dumps(said | {"metadata": {}}), encoding="utf-8")
        yield Path(scratch)

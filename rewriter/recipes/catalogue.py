"""The recipes that ship with the package, and how a name becomes a file. No pydantic, no torch: listing is instant."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

from rewriter.common.errors import RewriterError, did_you_mean
from rewriter.common.yaml_documents import read, read_file


class Entry(NamedTuple):
    """One line of `rewrite recipes`."""

    name: str
    summary: str
    passes: tuple[str, ...]


@cache
def library() -> dict[str, Path]:
    """The file of every shipped recipe, by name."""
    files = (Path(__file__).parent / "library").glob("*.yaml")
    return {path.stem: path for path in sorted(files, key=lambda path: path.stem)}


def entries() -> list[Entry]:
    """Name, summary and passes of every shipped recipe."""
    listed = []
    for name, path in library().items():
        data = read(read_file(path)).data
        listed.append(Entry(name, data["summary"], tuple(spec["pass"] for spec in data["passes"])))
    return listed


def find(name_or_path: str | os.PathLike[str]) -> Path:
    """The file of a shipped recipe by its name, or the path itself.

    Raises RewriterError with the nearest name for a name that does not ship. Whether a path exists is found on reading.
    """
    name = os.fspath(name_or_path)
    if name in library():
        return library()[name]
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1 or not isinstance(name_or_path, str):
        return path
    raise RewriterError(
        f"recipe {name!r}: no such recipe. {did_you_mean(name, library(), what='shipped')} "
        "A file of your own ends in .yaml."
    )

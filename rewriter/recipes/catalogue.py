"""The recipes that ship with the package, and how a name becomes a file. No pydantic, no torch: listing is instant."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from rewriter.common.errors import RewriterError, did_you_mean
from rewriter.common.yaml_documents import read, read_file

Kind = Literal["exact", "overlapped", "fewer", "prompt", "bits", "sequences", "timing"]
KINDS: dict[Kind, str] = {
    "exact": "Exact: the same function",
    "overlapped": "Overlapped all-reduces: another function, heal it",
    "fewer": "Fewer all-reduces: another function, heal it",
    "prompt": "The prompt alone: another function of the prompt, the original's wiring after it",
    "bits": "Fewer bits: long messages are rounded",
    "sequences": "Long sequences: the same function, ranks share tokens",
    "timing": "Timing only: no checkpoint is written",
}
"""The kinds of shipped recipes in the order of the listing, with a title each."""


class Entry(NamedTuple):
    """A recipe in `rewrite recipes`. `recommended`: the purpose that it is recommended for, or None."""

    name: str
    summary: str
    passes: tuple[str, ...]
    kind: Kind
    recommended: str | None

    @property
    def short(self) -> str:
        """The first sentence of the summary."""
        return self.summary.partition(". ")[0].removesuffix(".")


@cache
def library() -> dict[str, Path]:
    """The file of every shipped recipe, by name."""
    files = (Path(__file__).parent / "library").glob("*.yaml")
    return {path.stem: path for path in sorted(files, key=lambda path: path.stem)}


def entries() -> list[Entry]:
    """Every shipped recipe, by kind in the order of KINDS; a recommended one first, then by name."""
    listed = []
    for name, path in library().items():
        data = read(read_file(path)).data
        passes = tuple(spec["pass"] for spec in data["passes"])
        listed.append(Entry(name, data["summary"], passes, data["kind"], data.get("recommended")))
    order = list(KINDS)
    return sorted(listed, key=lambda entry: (order.index(entry.kind), entry.recommended is None, entry.name))


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

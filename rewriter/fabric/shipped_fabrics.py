"""The fabrics that ship, and how a name becomes one."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from rewriter.common.errors import RewriterError
from rewriter.common.suggestions import did_you_mean
from rewriter.common.yaml_documents import read_file
from rewriter.fabric.fabric import Fabric

LIBRARY = Path(__file__).parent / "library"


def fabrics() -> tuple[str, ...]:
    """The names of the fabrics that ship."""
    return tuple(sorted(path.stem for path in LIBRARY.glob("*.yaml")))


def load_fabric(name_or_path: str | os.PathLike[str]) -> Fabric:
    """A fabric that ships, by name, or one of a file that ends in .yaml.

    Raises RewriterError: no such fabric (with the nearest name), or all faults of the file, each with its line.
    """
    name = os.fspath(name_or_path)
    if name in fabrics():
        return _shipped(name)
    path = Path(name)
    if path.suffix not in (".yaml", ".yml") and len(path.parts) < 2 and isinstance(name_or_path, str):
        raise RewriterError(
            f"fabric {name!r:.80}: no such fabric. {did_you_mean(name, fabrics(), what='shipped')} "
            "A file of your own ends in .yaml."
        )
    return _read(path, name)


@cache
def _shipped(name: str) -> Fabric:
    return _read(LIBRARY / f"{name}.yaml", name)


def _read(path: Path, name: str) -> Fabric:
    from rewriter.fabric.schema import MAX_BYTES, parse

    return parse(read_file(path, "fabric", MAX_BYTES), name)

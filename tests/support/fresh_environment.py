"""A virtual environment with what pyproject.toml declares, and nothing else: links to what is installed here."""

from __future__ import annotations

import sys
import tomllib
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from repository import ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def distributions(*extras: str) -> dict[str, Distribution]:
    """What is installed here for the dependencies of the package and of its `extras`, and for what those require."""
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in EXTRAS[extra])]
    wanted = [(Requirement(line), "") for line in lines]
    found: dict[str, Distribution] = {}
    asked: set[tuple[str, str]] = set()
    while wanted:
        requirement, extra = wanted.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        one = distribution(requirement.name)
        found[one.name] = one
        for inner in {"", *requirement.extras}:
            if (one.name, inner) not in asked:
                asked.add((one.name, inner))
                wanted += [(Requirement(line), inner) for line in one.requires or ()]
    return found


def make(place: Path, *extras: str) -> tuple[Path, Path]:
    """The environment in `place`, without pip and without rewriter itself; its Python and its site-packages."""
    venv.create(place, symlinks=True)
    site = place / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    for one in distributions(*extras).values():
        for name in {file.parts[0] for file in one.files or () if ".." not in file.parts} - {"__pycache__"}:
            if not (site / name).exists():
                (site / name).symlink_to(Path(str(one.locate_file(name))).resolve())
    return place / "bin/python", site

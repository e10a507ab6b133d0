"""What an installed package holds besides Python files: everything that the source tree holds."""

from __future__ import annotations

import tomllib
from pathlib import Path

from repository import ROOT


def test_every_data_file_is_packaged() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    packaged: set[Path] = set()
    for package, patterns in settings["package-data"].items():
        folder = ROOT.joinpath(*package.split("."))
        for pattern in patterns:
            found = set(folder.glob(pattern))
            assert found, f"{package}: {pattern} matches nothing"
            packaged |= found
    present = {p for p in (ROOT / "rewriter").rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")}
    assert {p.relative_to(ROOT).as_posix() for p in present - packaged} == set()

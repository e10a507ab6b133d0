"""A refused command: one message, a non-zero exit, and the working directory as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from rewriter.cli import main

Capture = pytest.CaptureFixture[str]


def listing(root: Path) -> dict[str, bytes | None]:
    return {p.relative_to(root).as_posix(): p.read_bytes() if p.is_file() else None for p in sorted(root.rglob("*"))}


def refused(capsys: Capture, *words: str, code: int = 2) -> str:
    """The one message of a refused command that left everything as it was."""
    before = listing(Path.cwd())
    assert main(list(words)) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    assert listing(Path.cwd()) == before
    return err.removeprefix("error: ").strip()


def written(capsys: Capture, *more: str) -> None:
    """Convert `m` to `out`, with nothing of what was printed kept."""
    assert main(["m", "--recipe", "ladder", "--out", "out", "--verify", "none", *more]) == 0
    capsys.readouterr()

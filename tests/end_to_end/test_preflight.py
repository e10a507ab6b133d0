"""What a conversion needs of disk and memory is asked for before anything is written, and only what it really needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import zoo

from rewriter import api
from rewriter.check import drift
from rewriter.common.errors import RewriterError
from rewriter.weights import space
from rewriter.weights.early_copies import EarlyCopies
from rewriter.weights.header import read_header

BESIDE = 8 << 20  # what is asked for beside weights


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "llama"
    zoo.save("llama", path)
    return path


def disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """A disk with this much room, without early copies, which take room of the real one."""

    def refuse(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(EarlyCopies, "__init__", refuse)
    monkeypatch.setattr(space, "available", lambda _: free)


def converted(source: Path, tmp_path: Path, **options: Any) -> set[str]:
    api.convert(source, "ladder", out=tmp_path / "out", tp=2, options=api.SaveOptions(**{"verify": "none", **options}))
    return {path.name for path in tmp_path.iterdir()}


def refused(source: Path, tmp_path: Path, **options: Any) -> str:
    with pytest.raises(RewriterError) as caught:
        converted(source, tmp_path, **options)
    assert not list(tmp_path.iterdir())
    return str(caught.value)


def test_too_little_room_and_a_link_that_needs_none(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk(monkeypatch, BESIDE + 200_000)
    size = read_header(source / "model.safetensors").size
    assert size > 200_000
    message = refused(source, tmp_path)
    assert f"{BESIDE + 200_000} bytes" in message
    assert "are needed there and" in message
    assert "Make room or choose another --out" in message
    assert converted(source, tmp_path, link=True) == {"out"}


def test_too_little_memory_for_verification(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "available_memory", lambda: 600_000_000)
    message = refused(source, tmp_path, verify="shrunken")
    assert "verification on 2 ranks needs 0.7 GB of memory and 0.6 GB are free" in message
    assert "--verify none" in message
    assert converted(source, tmp_path) == {"out"}


def test_a_resumed_run_needs_room_for_what_is_missing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("rewriter.convert.conversion.model_card", interrupt)
        with pytest.raises(KeyboardInterrupt):
            converted(source, tmp_path)
    assert not (tmp_path / "out").exists()
    disk(monkeypatch, BESIDE + 10_000)
    assert converted(source, tmp_path, resume=True) == {"out"}
    api.verify(tmp_path / "out")


def interrupt(*_: object) -> str:
    raise KeyboardInterrupt

"""Copies that begin before it is known whether they are wanted: right where they are taken, gone where they are not."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import zoo

from rewriter import api
from rewriter.common.errors import RewriterError
from rewriter.convert.save_options import SaveOptions
from rewriter.weights import Checkpoint
from rewriter.weights import early_copies as module
from rewriter.weights.early_copies import EarlyCopies, begun_copies
from rewriter.weights.header import encode_header

SIZE = (17 << 20) + 4096 + 24  # of the data: more than a piece


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    (tmp_path / "model").mkdir()
    header = encode_header({"w": ("U8", (SIZE,), SIZE)}, {"format": "pt"})
    (tmp_path / "model" / "model.safetensors").write_bytes(header + os.urandom(SIZE))
    return Checkpoint.open(tmp_path / "model")


def open_files(directory: Path) -> int:
    """How many files below a directory this process has open, those without a name included."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # it was open for the listing
            found += os.readlink(f"/proc/self/fd/{fd}").startswith(f"{directory}/")
    return found


def test_a_copy_gets_its_name_when_it_is_taken(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (source,), before = checkpoint.files, open_files(tmp_path)
    (tmp_path / "out").mkdir()
    with EarlyCopies(checkpoint, tmp_path / "out") as early:
        digest = early.sha256(source)
        assert not list((tmp_path / "out").iterdir())
        assert early.nbytes() >= SIZE
        assert early.take(source, tmp_path / "out" / "a") == digest
        assert early.nbytes() == 0
    assert digest == hashlib.sha256(source.read_bytes()).hexdigest()
    assert (tmp_path / "out" / "a").read_bytes() == source.read_bytes()
    assert open_files(tmp_path) == before


def test_what_is_not_taken_is_gone(checkpoint: Checkpoint, tmp_path: Path) -> None:
    before = open_files(tmp_path)
    with pytest.raises(KeyboardInterrupt), EarlyCopies(checkpoint, tmp_path):
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert open_files(tmp_path) == before


def test_for_links_files_are_only_hashed(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with begun_copies(tmp_path / "model", out=tmp_path / "out", link=True) as early:
        assert early is not None
        assert early.nbytes() == 0
        assert early.sha256(checkpoint.files[0]) == hashlib.sha256(checkpoint.files[0].read_bytes()).hexdigest()


def test_a_source_that_shrinks_is_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    os.truncate(checkpoint.files[0], 1000)
    with EarlyCopies(checkpoint, tmp_path) as early, pytest.raises(RewriterError, match="became shorter"):
        early.take(checkpoint.files[0], tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("options", [{"dtype": "fp16"}, {"resume": True}, {"dry_run": True}, {"materialize": True}])
def test_copies_do_not_begin_where_others_are_written(options: dict[str, Any]) -> None:
    assert SaveOptions().copies_files
    assert not SaveOptions(**options).copies_files


def test_copies_do_not_begin_without_room(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rewriter.weights.early_copies.available", lambda _: SIZE // 2)
    with begun_copies(tmp_path / "model", tmp_path / "out", link=False) as early:
        assert early is None


# A conversion


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "llama"
    zoo.save("llama", path)
    return path


def test_a_conversion_takes_them(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, take = [], EarlyCopies.take
    monkeypatch.setattr(EarlyCopies, "take", lambda self, *files: taken.append(files) or take(self, *files))
    api.convert(source, "ladder", out=tmp_path / "out", tp=2, options=api.SaveOptions(verify="none"))
    assert [from_.name for from_, _ in taken] == ["model.safetensors"]
    api.verify(tmp_path / "out")
    other = {"desync.untie_norms": True, "permute.ranks": {}}  # other weights than the source's are written
    api.convert(source, "desync-2x", out=tmp_path / "other", tp=2, set=other, options=api.SaveOptions(verify="none"))
    assert len(taken) == 1
    api.verify(tmp_path / "other")


def test_without_files_that_have_no_name_it_copies_as_ever(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(directory: Path) -> int:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), directory)

    monkeypatch.setattr("rewriter.weights.early_copies.unnamed", refuse)
    with begun_copies(source, tmp_path / "out", link=False) as early:
        assert early is None
    api.convert(source, "ladder", out=tmp_path / "out", tp=2, options=api.SaveOptions(verify="none"))
    api.verify(tmp_path / "out")


def test_a_refused_conversion_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, before, begin = [], open_files(tmp_path), module.begun_copies
    monkeypatch.setattr(module, "begun_copies", lambda *a, **k: begun.append(begin(*a, **k)) or begun[-1])
    with pytest.raises(RewriterError, match="--tp 3"):
        api.convert(source, "ladder", out=tmp_path / "out", tp=3, options=api.SaveOptions(verify="none"))
    assert isinstance(begun[0], EarlyCopies)
    assert not list(tmp_path.iterdir())
    assert open_files(tmp_path) == before


def test_a_file_system_that_takes_the_flag_and_refuses_direct_writes(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, refused = os.write, []

    def limited(file: int, data: Any) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(file)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return write(file, data)

    monkeypatch.setattr(os, "write", limited)
    monkeypatch.setattr("rewriter.weights.early_copies.PIECE", 4096)
    source = checkpoint.files[0]
    with EarlyCopies(checkpoint, tmp_path) as early:
        early.take(source, tmp_path / "a")
    assert refused
    assert (tmp_path / "a").read_bytes() == source.read_bytes()

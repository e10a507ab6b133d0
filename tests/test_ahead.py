"""Copies made ahead: whole, hashed, given a name only when taken, and gone otherwise."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import emitted
import pytest

from rewriter.api import convert
from rewriter.weights import ahead as copying
from rewriter.weights.ahead import Ahead, copies_ahead

pytestmark = pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="unnamed files are Linux's")

SIZES = (5 << 20, (9 << 20) + 123, 17)  # one of whole buffers only, one with a rest, one of a rest only


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    source = tmp_path / "source"
    source.mkdir()
    paths = [source / f"file-{i}" for i in range(len(SIZES))]
    for path, size in zip(paths, SIZES, strict=True):
        path.write_bytes(os.urandom(size))
    return paths


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def wait_for(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_copies_are_whole_and_hashed_and_nothing_else_appears(files: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Ahead(out / "not" / "there", files) as ahead:
        assert ahead._process is not None
        ahead._process.wait(30)
        assert ahead.stop() == set(files), "it had time for all"
        out.mkdir()
        assert list(out.iterdir()) == []
        for file in files:
            digest = ahead.take(file, out / file.name)
            assert digest == sha256(file) == sha256(out / file.name)
    assert sorted(p.name for p in out.iterdir()) == [file.name for file in files]
    assert (out / files[0].name).stat().st_ino != files[0].stat().st_ino


def test_what_is_not_taken_vanishes(files: list[Path], tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    ahead = Ahead(tmp_path / "out", files)
    with ahead:
        process = ahead._process
        ahead.stop()
    assert sorted(tmp_path.rglob("*")) == before
    assert process is not None
    assert process.poll() is not None
    assert ahead._fds == []


def test_a_file_that_was_not_begun_or_has_changed_is_not_taken(files: list[Path], tmp_path: Path) -> None:
    with Ahead(tmp_path, files) as ahead:
        assert ahead._process is not None
        ahead._process.wait(30)
        ahead.stop()
        assert ahead.take(tmp_path / "another", tmp_path / "x") is None
        files[1].write_bytes(b"other content")
        assert ahead.take(files[1], tmp_path / "x") is None
        assert not (tmp_path / "x").exists()


def test_a_failed_copy_is_none(files: list[Path], tmp_path: Path) -> None:
    with Ahead(tmp_path, files) as ahead:
        assert ahead._process is not None
        os.kill(ahead._process.pid, signal.SIGKILL)
        for file in ahead.stop():
            assert ahead.take(file, tmp_path / "x") in (None, sha256(file))


def test_the_process_ends_with_its_parent(files: list[Path], tmp_path: Path) -> None:
    os.truncate(files[0], 2 << 30)  # sparse, and long enough to be under way
    script = "import sys, time; from pathlib import Path; from rewriter.weights.ahead import Ahead\n"
    script += "ahead = Ahead(Path(sys.argv[1]), [Path(sys.argv[2])]).__enter__()\n"
    script += "print(ahead._process.pid, flush=True); time.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", script, tmp_path, files[0]], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    wait_for(lambda: not Path(f"/proc/{child}").exists() or "State:\tZ" in Path(f"/proc/{child}/status").read_text())


def test_small_or_broken_checkpoints_are_left_to_the_conversion(files: list[Path], tmp_path: Path) -> None:
    for model in (tmp_path / "source", tmp_path / "absent"):
        with copies_ahead(model, tmp_path / "out", wanted=True) as ahead:
            assert ahead._process is None
            assert ahead.stop() == set()


def test_a_conversion_with_copies_ahead_writes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    take = Ahead.take

    def watched(self: Ahead, source: Path, target: Path) -> str | None:
        digest = take(self, source, target)
        taken.append((source.name, digest))
        return digest

    def waited(self: Ahead) -> set[Path]:
        if self._process is not None:
            self._process.wait(30)
        return stop(self)

    stop = Ahead.stop
    monkeypatch.setattr(Ahead, "take", watched)
    monkeypatch.setattr(Ahead, "stop", waited)
    source, outputs = emitted.source("llama"), {}
    for label, least in (("plain", 1 << 60), ("ahead", 0)):
        monkeypatch.setattr(copying, "WORTHWHILE", least)
        out = tmp_path / label
        convert(source, "ladder", out=out, tp=2, verify="none")
        outputs[label] = {p.relative_to(out).as_posix(): sha256(p) for p in sorted(out.rglob("*")) if p.is_file()}
    assert taken == [("model.safetensors", sha256(source / "model.safetensors"))]
    assert outputs["plain"] == outputs["ahead"]

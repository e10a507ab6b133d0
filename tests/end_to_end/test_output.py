"""The output directory: complete or absent, whatever happens, and never someone else's."""

# ruff: noqa: PT012  (the block under test is the `with` itself: what is raised inside decides what is left)

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rewriter.common.errors import RewriterError, VerificationError
from rewriter.emit.files.output_directory import OutputDirectory
from rewriter.weights import Checkpoint, ShardPlan, convert_files
from rewriter.weights.expressions import Slice, Tensor
from rewriter.weights.header import encode_header

JOB = {"source": "abc", "tp": 2}


def listing(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def write(final: Path, resume: bool = False, job: Any = None) -> None:
    with OutputDirectory(final, resume, job or JOB) as output:
        output.write("config.json", "{}")
        output.write("runtime/tp2/module.py", "x = 1\n")
        output.manifest({"schema": 1})


def interrupt(final: Path, job: Any = None) -> None:
    """Leave what an interrupted run leaves: one finished file, one half-written."""
    with pytest.raises(KeyboardInterrupt), OutputDirectory(final, False, job or JOB) as output:
        output.write("done.txt", "finished")
        output.path("half.txt").write_text("hal")
        raise KeyboardInterrupt


def test_a_finished_output_and_nothing_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "out")
    files = listing(tmp_path)
    assert set(files) == {"out/config.json", "out/runtime/tp2/module.py", "out/rewrite.json"}
    assert json.loads(files["out/rewrite.json"]) == {"schema": 1, "job": JOB}


def test_the_final_place_stays_empty_until_the_end(tmp_path: Path) -> None:
    final = tmp_path / "deep" / "out"
    with OutputDirectory(final, job=JOB) as output:
        output.write("a", b"1")
        output.write("sub/b", b"2")
        assert not final.exists()
        output.manifest({})
        assert not final.exists()
    assert set(listing(final)) == {"a", "sub/b", "rewrite.json"}


def test_an_empty_directory_is_taken_and_a_symlink_kept(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to("real")
    write(tmp_path / "out")
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "real" / "rewrite.json").exists()


@pytest.mark.parametrize("resume", [False, True])
def test_a_directory_that_is_not_ours_is_never_touched(tmp_path: Path, resume: bool) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    with pytest.raises(RewriterError, match=r"not an output of rewriter, so it is not touched\. Choose another --out"):
        write(tmp_path / "out", resume)
    assert listing(tmp_path) == {"out/thesis.tex": b"mine"}
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RewriterError, match="is a file"):
        write(tmp_path / "file", resume)
    assert listing(tmp_path) == {"out/thesis.tex": b"mine", "file": b"mine"}


def test_a_staging_directory_that_is_not_ours_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / ".out.rewriting").mkdir()
    (tmp_path / ".out.rewriting" / "thesis.tex").write_text("mine")
    for resume in (False, True):
        with pytest.raises(RewriterError, match="no journal says"):
            write(tmp_path / "out", resume)
    assert listing(tmp_path) == {".out.rewriting/thesis.tex": b"mine"}


def test_a_journal_that_is_not_ours_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / ".out.rewriting.journal").write_text("dear diary\n")
    with pytest.raises(RewriterError, match="is not a journal of rewriter"):
        write(tmp_path / "out")
    assert listing(tmp_path) == {".out.rewriting.journal": b"dear diary\n"}


def test_something_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(RewriterError, match="written there meanwhile"), OutputDirectory(tmp_path / "out") as output:
        output.manifest({})
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.tex").write_text("mine")
    assert listing(tmp_path) == {"out/thesis.tex": b"mine"}


def test_a_finished_output_is_refused_but_recognised_by_resume(tmp_path: Path) -> None:
    write(tmp_path / "out")
    before = listing(tmp_path)
    with pytest.raises(RewriterError, match=r"already holds an output of rewriter\. Choose another --out, or"):
        write(tmp_path / "out")
    with pytest.raises(RewriterError, match="already holds"):
        write(tmp_path / "out", resume=True, job={"source": "abc", "tp": 4})
    with OutputDirectory(tmp_path / "out", resume=True, job=JOB) as output:
        assert output.complete
    assert listing(tmp_path) == before


@pytest.mark.parametrize("error", [VerificationError("logits differ"), RewriterError("no"), ValueError("bug")])
def test_a_failure_leaves_nothing(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)) as caught, OutputDirectory(tmp_path / "out", job=JOB) as output:
        output.write("a/b/c", b"1")
        output.manifest({})
        raise error
    assert caught.value is error
    assert list(tmp_path.iterdir()) == []


def test_a_failure_keeps_the_empty_directory_that_was_there(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(VerificationError), OutputDirectory(tmp_path / "out") as output:
        output.write("a", b"1")
        raise VerificationError("no")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert list((tmp_path / "out").iterdir()) == []


def test_an_output_without_manifest_is_a_bug_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="without a manifest"), OutputDirectory(tmp_path / "out") as output:
        output.write("a", b"1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", "", ".", "rewrite.json"])
def test_names_stay_inside(tmp_path: Path, name: str) -> None:
    with (
        pytest.raises(RewriterError, match="not the name of a file inside"),
        OutputDirectory(tmp_path / "out") as output,
    ):
        output.path(name)
    assert list(tmp_path.iterdir()) == []


def test_two_runs_exclude_each_other(tmp_path: Path) -> None:
    with OutputDirectory(tmp_path / "out", job=JOB) as output:
        output.write("a", b"1")
        for resume in (False, True):
            with pytest.raises(RewriterError, match="another run is writing there"):
                write(tmp_path / "out", resume)
        output.manifest({})
    assert set(listing(tmp_path)) == {"out/a", "out/rewrite.json"}


def test_resume_keeps_what_is_finished_and_deletes_the_rest(tmp_path: Path) -> None:
    interrupt(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with OutputDirectory(tmp_path / "out", resume=True, job=JOB) as output:
        assert output.finished("done.txt") == hashlib.sha256(b"finished").hexdigest()
        assert output.finished("half.txt") is None
        assert not output.path("half.txt").exists()
        output.write("half.txt", "half")
        output.manifest({})
    assert {n: d for n, d in listing(tmp_path).items() if n != "out/rewrite.json"} == {
        "out/done.txt": b"finished",
        "out/half.txt": b"half",
    }


@pytest.mark.parametrize("damage", [b"finishe", b"finisheD", b""])
def test_resume_checks_what_is_finished(tmp_path: Path, damage: bytes) -> None:
    interrupt(tmp_path / "out")
    (tmp_path / ".out.rewriting" / "done.txt").write_bytes(damage)
    with OutputDirectory(tmp_path / "out", resume=True, job=JOB) as output:
        assert output.finished("done.txt") is None
        assert not output.path("done.txt").exists()
        output.manifest({})


def test_resume_survives_a_torn_journal(tmp_path: Path) -> None:
    interrupt(tmp_path / "out")
    with open(tmp_path / ".out.rewriting.journal", "ab") as file:
        file.write(b'{"file": "half.txt", "si')
    interrupted = "done.txt"
    with pytest.raises(KeyboardInterrupt), OutputDirectory(tmp_path / "out", resume=True, job=JOB) as output:
        assert output.finished(interrupted)
        output.write("more.txt", b"more")
        raise KeyboardInterrupt
    with OutputDirectory(tmp_path / "out", resume=True, job=JOB) as output:
        assert output.finished(interrupted)
        assert output.finished("more.txt")
        output.manifest({})


def test_resume_of_another_job_is_refused_by_name_and_without_resume_it_starts_over(tmp_path: Path) -> None:
    interrupt(tmp_path / "out", {"source": "abc", "tp": 4})
    before = listing(tmp_path)
    with pytest.raises(RewriterError, match=r"had tp 4, this one has 2"):
        write(tmp_path / "out", resume=True)
    with pytest.raises(RewriterError, match=r"had dtype not set, this one has 'bf16'"):
        write(tmp_path / "out", resume=True, job={"source": "abc", "tp": 4, "dtype": "bf16"})
    assert listing(tmp_path) == before
    write(tmp_path / "out")
    assert set(listing(tmp_path)) == {"out/config.json", "out/runtime/tp2/module.py", "out/rewrite.json"}


# kill -9: a process that converts, and dies at its n-th system call that changes the disk

CHILD = """
import os, signal, sys
from pathlib import Path
from rewriter.emit.files.output_directory import OutputDirectory
from rewriter.weights import Checkpoint, ShardPlan, convert_files, finite, shards
from rewriter.weights.expressions import Slice, Tensor

root, deadline, resume = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "resume"
calls = 0

def dying(real):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == deadline:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    return call

finite.PIECE = shards.MADE = 1 << 20
for name in ("open", "write", "fsync", "rename", "mkdir", "unlink", "ftruncate"):
    setattr(os, name, dying(getattr(os, name)))

checkpoint = Checkpoint.open(root / "model")
with OutputDirectory(root / "out", resume, {"source": checkpoint.fingerprint(), "tp": 4}) as output:
    if not output.complete:
        parts = [Slice(Tensor("w"), 1, ((rank * 256, rank * 256 + 256),)) for rank in range(4)]
        names = [f"runtime/rank-{rank}.safetensors" for rank in range(4)]
        plans = [ShardPlan(output.path(name), {"w": (part, None)})
                 for name, part in zip(names, parts) if not output.finished(name)]
        name = "model.safetensors"
        copies = [] if output.finished(name) else [(checkpoint.files[0], output.path(name))]
        print("skipped", 5 - len(plans) - len(copies), file=sys.stderr)
        convert_files(checkpoint, copies, plans, finished=output.record)
        output.write("config.json", "{}")
        output.manifest({"files": {name: digest for name, (_, digest) in sorted(output.files.items())}})
print(calls)
"""


def convert(root: Path, deadline: int, resume: bool) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-c", CHILD, str(root), str(deadline), "resume" if resume else "afresh"]
    return subprocess.run(arguments, capture_output=True, text=True, check=False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint of 6 MB at tmp_path / "model"; returns tmp_path."""
    (tmp_path / "model").mkdir()
    header = encode_header({"w": ("F32", (1536, 1024), 1536 * 4096)}, {"format": "pt"})
    (tmp_path / "model" / "model.safetensors").write_bytes(header + os.urandom(1536 * 4096))
    return tmp_path


@pytest.mark.slow  # soak.kills strikes whole conversions in every run
def test_kill_9_anywhere_then_resume(model: Path) -> None:
    whole = convert(model, 0, resume=False)
    assert whole.returncode == 0, whole.stderr
    expected, total = listing(model / "out"), int(whole.stdout)
    source = listing(model / "model")
    assert total > 30
    skipped = 0
    # Evenly spread over the run, with the first and the last steps, where the directory changes hands.
    for deadline in sorted({1, 2, 3, total - 2, total - 1, total, *range(5, total, total // 8)}):
        subprocess.run(["rm", "-r", model / "out"], check=True)
        died = convert(model, deadline, resume=False)
        assert died.returncode == -signal.SIGKILL
        if (model / "out").exists():  # after the rename: complete
            assert listing(model / "out") == expected
        resumed = convert(model, 0, resume=True)
        assert resumed.returncode == 0, f"after dying at {deadline}: {resumed.stderr}"
        skipped += int(resumed.stderr.split()[-1]) if resumed.stderr else 0
        assert listing(model / "out") == expected
        assert {path.name for path in model.iterdir()} == {"model", "out"}
        assert listing(model / "model") == source
    assert skipped > 5  # resuming is more than starting over


# A full disk


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system with 2 MiB of room: a real one where this user may mount, else one whose writes fail as a full
    disk's."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    arguments = ["-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if mount and subprocess.run([mount, *arguments], capture_output=True, check=False).returncode == 0:
        yield place
        subprocess.run(["umount", place], check=True)
        return
    fill_up(monkeypatch)
    yield place


def fill_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on no file may become larger than 2 MiB; then the disk is full."""

    write = os.write

    def limited(fd: int, data: bytes) -> int:
        if os.fstat(fd).st_size + len(data) > 2 << 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data)

    monkeypatch.setattr(os, "write", limited)


def attempt(model: Path, final: Path) -> str:
    checkpoint = Checkpoint.open(model / "model")
    with pytest.raises(RewriterError) as caught, OutputDirectory(final, job=JOB) as output:
        copy = (checkpoint.files[0], output.path("model.safetensors"))
        shard = {"w": (Slice(Tensor("w"), 0, ((0, 100),)), None)}
        with contextlib.suppress(RewriterError):  # what fills the disk comes later
            output.require_space(copy[0].stat().st_size + 100 * 4096)
        convert_files(checkpoint, [copy], [ShardPlan(output.path("x"), shard)], finished=output.record)
        output.manifest({})
    return str(caught.value)


def test_a_full_disk_is_named_and_left_empty(model: Path, small_disk: Path) -> None:
    size = (model / "model" / "model.safetensors").stat().st_size
    message = attempt(model, small_disk / "out")
    assert f"the disk is full: {size + 100 * 4096} bytes are needed in all and" in message
    assert "were left. Make room or choose another --out." in message
    assert list(small_disk.iterdir()) == []


def test_a_full_disk_in_the_middle_of_writing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_up(monkeypatch)
    assert "the disk is full" in attempt(model, model / "out")
    assert [path.name for path in model.iterdir()] == ["model"]


def test_a_disk_that_fills_on_a_small_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(RewriterError, match="the disk is full"), OutputDirectory(tmp_path / "out") as output:
        monkeypatch.setattr(os, "fsync", full)
        output.write("config.json", "{}")
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_found_before_writing(tmp_path: Path) -> None:
    with (
        pytest.raises(RewriterError, match=r"1000000000000000000 bytes .* are needed there and \d+ bytes .* are free"),
        OutputDirectory(tmp_path / "out") as output,
    ):
        output.require_space(10**18)
    assert list(tmp_path.iterdir()) == []


def test_an_output_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RewriterError, match="file"):
        write(tmp_path / "file" / "out")

"""`rewrite adapt` as a command: what it prints, its exit codes, and the ranks that it starts."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import adapted
import pytest
import torch
from safetensors.torch import load_file

from rewriter.cli import main

SETTINGS = ["--length", "48", "--verify", "none", "--method", "sft"]
for setting in ("max_steps=1", "learning_rate=1e-2", "use_cpu=true", "gradient_accumulation_steps=1"):
    SETTINGS += ["--set", setting]


def command(directory: Path, out: Path, *more: str, data: Path | None = None) -> list[str]:
    files = ["--data", str(data or adapted.text_file()), "--eval", str(adapted.text_file(20, 1)), "--out", str(out)]
    return ["adapt", str(directory), *files, *SETTINGS, *more]


def test_the_command_tells_what_it_did_and_refuses_with_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, out = adapted.directory("ladder"), tmp_path / "out"
    assert main(command(directory, out, "--json")) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["out"] == str(out)
    assert set(report["losses"]) == {"original", "before", "after"}
    assert report["losses"]["after"] < report["losses"]["before"]
    assert report["adaptation"]["settings"]["learning_rate"] == 1e-2
    assert (report["adaptation"]["steps"], report["adaptation"]["rows_per_step"]) == (1, 8)

    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "x y"}\n{"texts": "x"}\n')
    refused: list[tuple[list[str], list[str]]] = [
        (command(directory, out), [f"{out}: already holds an output of rewriter. Choose another --out"]),
        (command(directory, tmp_path / "b", data=bad), [f"{bad}:2: ", 'neither "messages" nor "text"']),
        (command(directory, tmp_path / "b", "--set", "lr=1"), ["--set lr: ", "learning_rate"]),
        (
            command(directory, tmp_path / "b", "--set", "weight_decay=much"),
            ["weight_decay=much: expected a number"],
        ),
        (command(tmp_path, tmp_path / "b"), [f"{tmp_path}: no rewrite.json in it"]),
        (command(directory, Path("/")), ["/: exists, and is not an output of rewriter"]),
    ]
    for words, parts in refused:
        assert main(words) == 2, words
        printed = capsys.readouterr()
        assert not printed.out
        assert printed.err.startswith("error: ")
        assert all(part in printed.err for part in parts), printed.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "out"]


def _rewrite(words: list[str], timeout: int = 200) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "rewriter.cli", *words], capture_output=True, text=True, timeout=timeout, env=environment
    )


def test_no_library_prints_on_stderr(tmp_path: Path) -> None:
    done = _rewrite(command(adapted.directory("ladder"), tmp_path / "out", "--lora", "2", "--set", "save_steps=1"))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "the original's." in done.stdout
    assert done.stdout.splitlines()[-1].startswith("Next: rewrite ")


@pytest.mark.slow
def test_the_command_starts_its_ranks_and_tells_one_error(tmp_path: Path) -> None:
    directory = adapted.directory("ladder", 2)
    done = _rewrite(command(directory, tmp_path / "two", "--tp", "2", "--json"))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["adaptation"]["ranks"] == {"dp": 1, "sp": 1, "tp": 2}
    one = _rewrite(command(directory, tmp_path / "one"))
    assert one.returncode == 0, one.stderr
    expected = load_file(tmp_path / "one" / "model.safetensors")
    for name, tensor in load_file(tmp_path / "two" / "model.safetensors").items():
        assert (tensor != expected[name]).to(torch.float32).mean() < 0.02, name

    bad = tmp_path / "bad.jsonl"
    bad.write_text("not json\n")
    failed = _rewrite(command(directory, tmp_path / "b", "--tp", "2", data=bad))
    assert failed.returncode == 2
    assert failed.stderr.splitlines()[-1].startswith(f"error: {bad}:1: not JSON")
    assert failed.stderr.count("not JSON") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "one", "two"]


RANK = """
import sys
import torch.distributed as dist
from rewriter.cli import main
left = []
destroy = dist.destroy_process_group
dist.destroy_process_group = lambda *group: (left.append(dist.get_world_size()), destroy(*group))
code = main(sys.argv[1:])
print("left", left, dist.is_initialized(), file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.slow
def test_ranks_leave_their_group_before_they_end(tmp_path: Path) -> None:
    """A rank that ended within it was aborted now and then, after all was written."""
    (tmp_path / "rank.py").write_text(RANK)
    words = command(adapted.directory("ladder", 2), tmp_path / "two", "--tp", "2", "--json")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, str(tmp_path / "rank.py"), *words], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("left [2] False") == 2, done.stderr


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_events_that_cannot_be_written_are_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """TensorBoard writes them in a thread of its own, and names files in bytes."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    def write(self: RecordWriter, data: bytes) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), b"events.out.tfevents")

    monkeypatch.setattr(RecordWriter, "write", write)
    assert main(command(adapted.directory("ladder"), tmp_path / "b")) == 1
    told = capsys.readouterr().err
    assert told.splitlines()[-1].startswith("error: events.out.tfevents: Input/output error.")
    assert not (tmp_path / "b").exists()

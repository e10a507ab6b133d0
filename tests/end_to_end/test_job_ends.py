"""What is left of a job that is ended from outside: no process, and one line that says why."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import zoo
from fake_api import installed
from job_processes import RANK, descendants, is_gone, until
from repository import ROOT, TINY_LLAMA

from rewriter.cli import main
from rewriter.common.errors import RewriterError
from rewriter.common.files import scratch_folder
from rewriter.common.processes import Processes, environment, leaving_on_signals, run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it asks /proc")


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(autouse=True)
def signals_are_not_ignored() -> Iterator[None]:
    """A shell lets what it runs in the background ignore SIGINT, and nohup SIGHUP; children inherit that."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process in a session of its own, with an empty temporary directory; it ends with the test."""
    started: list[subprocess.Popen[str]] = []
    (tmp_path / "tmp").mkdir()

    def begin(*words: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, *words], env=environment(1, TMPDIR=str(tmp_path / "tmp")), cwd=ROOT, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            )
        )  # fmt: skip
        return started[-1]

    yield begin
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def left(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "tmp").iterdir())


JOB = f"""
import sys
from rewriter.common.processes import Processes, environment
with Processes(logged=False) as job:
    (job.scratch / "folder").mkdir()
    (job.scratch / "folder/file").write_text("x")
    for rank in range(2):
        job.start(f"rank {{rank}}", [sys.executable, "-c", {RANK!r}], environment())
    job.wait()
"""


def pids_of(job: subprocess.Popen[str], count: int) -> list[int]:
    """What its ranks write to its output: their numbers."""
    assert job.stdout is not None
    text = ""
    while text.count(" ") < count:
        more = os.read(job.stdout.fileno(), 64).decode()
        assert more, "it ended too early"
        text += more
    return [int(word) for word in text.split()]


@pytest.mark.parametrize("how", ["SIGKILL", "SIGKILL of the group", "SIGTERM", "SIGHUP", "SIGINT"])
def test_nothing_is_left_of_a_job_that_is_ended(start: Start, tmp_path: Path, how: str) -> None:
    job = start("-c", JOB)
    ranks = pids_of(job, 2)
    assert left(tmp_path)
    number = signal.Signals[how.split()[0]]
    os.killpg(job.pid, number) if "group" in how else job.send_signal(number)
    assert until(lambda: job.poll() is not None)
    assert until(lambda: all(map(is_gone, ranks)))
    assert left(tmp_path) == [] or number == signal.SIGKILL


LATE = "import time; time.sleep(2)" + RANK
KILLED_EARLY = f"""
import os, signal, sys
from rewriter.common.processes import Processes, environment
job = Processes(logged=False).__enter__()
os.write(1, b"%d " % job.start("rank 0", [sys.executable, "-c", {LATE!r}], environment()).pid)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_rank_whose_job_was_killed_while_it_started_ends_too(start: Start) -> None:
    (rank,) = pids_of(start("-c", KILLED_EARLY), 1)
    assert until(lambda: is_gone(rank))


def test_a_process_of_a_rank_is_no_orphan() -> None:
    """A script that a rank runs may start `rewrite`: the job's variables are there, and its parent is the rank."""
    inner = "from rewriter.common.processes import end_with_job; end_with_job()"
    outer = f"import subprocess, sys\n{inner}\nsys.exit(subprocess.run([sys.executable, '-c', {inner!r}]).returncode)"
    with Processes() as job:
        job.start("rank 0", [sys.executable, "-c", outer], environment())
        assert job.wait(300) is None


def test_a_scratch_folder_goes_with_its_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        _interrupted()
    assert list(tmp_path.iterdir()) == []


def _interrupted() -> None:
    with scratch_folder("test") as folder:
        assert folder.name.startswith("rewriter-test-")
        (folder / "file").write_text("x")
        raise KeyboardInterrupt


# Signals to the command


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_ends_a_command_as_ctrl_c_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    cleaned = []

    class Api(ModuleType):
        def inspect(self, *_: Any, **__: Any) -> None:
            try:
                os.kill(os.getpid(), signal.Signals[name])
                time.sleep(30)
            finally:
                cleaned.append(True)

    installed(Api("rewriter.api"), monkeypatch)
    before = signal.getsignal(signal.Signals[name])
    assert main(["inspect", "m"]) == 128 + signal.Signals[name]
    assert capsys.readouterr().err == f"error: ended by {name}.\n"
    assert cleaned
    assert signal.getsignal(signal.Signals[name]) is before


def test_a_handler_of_the_program_stays() -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        mine = signal.getsignal(signal.SIGTERM)
        with leaving_on_signals():
            assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_nothing_is_left_of_a_conversion_that_is_ended(start: Start, tmp_path: Path, how: str) -> None:
    """In the middle of its verification, with ranks and the fork server."""
    zoo.save("llama", tmp_path / "m")
    job = start(
        "-m", "rewriter.cli", str(tmp_path / "m"), "--recipe", "ladder", "--tp", "2", "--out", str(tmp_path / "out")
    )
    assert until(lambda: any(name.startswith("rewriter-job-") for name in left(tmp_path)), 120)
    family = descendants(job.pid)
    assert family
    job.send_signal(signal.Signals[how])
    _, error = job.communicate(timeout=300)
    assert job.returncode == (143 if how == "SIGTERM" else -9)
    if how == "SIGTERM":
        assert error.splitlines()[-1] == "error: ended by SIGTERM."
        assert left(tmp_path) == []
    assert until(lambda: all(map(is_gone, family)))
    assert not (tmp_path / "out").exists()


# A rank that fails


def run_code(program: str, timeout: float) -> str:
    """Why a job fails whose three ranks run `program`."""
    with pytest.raises(RewriterError) as failure:
        run_ranks([sys.executable, "-c", program], {}, range(3), timeout=timeout, about="out: ")
    return str(failure.value)


def test_a_killed_rank_is_told_at_once_in_one_line() -> None:
    said = run_code("import os, sys, time; os.kill(os.getpid(), 9) if sys.argv[-2] == '1' else time.sleep(600)", 500)
    assert said.startswith("out: rank 1 was killed by SIGKILL (signal 9), as the system does where memory")
    assert "\n" not in said


def test_a_rank_that_fails_is_named_with_its_traceback() -> None:
    said = run_code(
        "import time\nfrom rewriter.common.processes import rank_main\n"
        "rank_main(lambda _, rank: 1 / 0 if rank == 2 else time.sleep(600))", 500
    )  # fmt: skip
    assert said.startswith("out: rank 2 failed:\nTraceback")
    assert said.splitlines()[-1] == "ZeroDivisionError: division by zero"


def test_a_job_has_a_limit_of_time() -> None:
    said = run_code("import time; print('reading', flush=True); time.sleep(600)", 3)
    assert said.startswith("out: 3 ranks gave no result in 3 s, and were stopped. The last line of rank 0: ")


@pytest.mark.slow
def test_nothing_is_left_of_commands_that_succeed(tmp_path: Path) -> None:
    """But for the cache of torch's compiler, which is of the user, not of the run."""
    model, scratch = str(TINY_LLAMA), tmp_path / "scratch"
    scratch.mkdir()
    for words in (
        [model, "--recipe", "ladder-upper-half", "--tp", "2", "--out", "out"],
        ["generate", "out", "--prompt", "def x", "--max-new-tokens", "4"],
        ["adapt", "out", "--out", "adapted", "--data", "self:2048", "--tokens", "1024", "--tp", "2"],
        ["verify", "out"],
        ["diff", "out"],
    ):
        command = [sys.executable, "-m", "rewriter.cli", *words]
        settings = environment(1) | {"TMPDIR": str(scratch), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        subprocess.run(command, cwd=tmp_path, env=settings, check=True, capture_output=True, timeout=300)
        assert [p.name for p in scratch.iterdir() if not p.name.startswith("torchinductor_")] == [], words

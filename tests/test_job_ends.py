"""What is left of a job that is ended from outside: no process and no temporary folder, and one line that says why."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import zoo
from fake_api import installed
from subprocesses import ROOT

from rewriter.cli import main
from rewriter.common import processes
from rewriter.common.errors import RewriterError
from rewriter.common.processes import Processes, environment, leaving_on_signals, run_ranks
from rewriter.common.scratch import scratch_folder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it asks /proc")


def until(holds: Callable[[], bool], seconds: float = 120.0) -> bool:
    limit = time.monotonic() + seconds
    while not holds() and time.monotonic() < limit:
        time.sleep(0.02)
    return holds()


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


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


RANK = """
import os, time
from rewriter.common.processes import end_with_job
end_with_job()
os.write(1, f"{os.getpid()} ".encode())
time.sleep(600)
"""
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
    assert until(lambda: left(tmp_path) == [])


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


def test_a_rank_that_a_signal_stops_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STOPPED_SECONDS", 2.0)
    with Processes() as job:
        ranks = [job.start(f"rank {rank}", ["sleep", "600"], environment()) for rank in range(2)]
        os.kill(ranks[1].pid, signal.SIGSTOP)
        failure = job.wait(300)
    assert failure is not None
    assert (failure.name, failure.how) == ("rank 1", "was stopped by a signal for 2 s, while the others waited for it")
    # it is let go on, and hears that it is to end
    assert [rank.poll() for rank in ranks] == [-signal.SIGTERM, -signal.SIGTERM]


def test_a_rank_that_stops_slow_down_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As cpulimit does, whose period may be that of the looks: whenever somebody looks, it stands still."""
    clock = itertools.count(0.0, 1.1 * processes._LOOK_SECONDS)  # of the watch
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with subprocess.Popen(["sleep", "600"]) as rank:
        try:
            watch, found = processes._Watch(), []
            for _ in range(80):
                os.kill(rank.pid, signal.SIGSTOP)
                assert until(lambda: processes.state_of(rank.pid) == "T")
                found.append(watch.stopped({"rank 0": rank.pid}))
                os.kill(rank.pid, signal.SIGCONT)
                assert until(lambda: processes.state_of(rank.pid) != "T")
            os.kill(rank.pid, signal.SIGSTOP)
            assert until(lambda: processes.state_of(rank.pid) == "T")
            found += [watch.stopped({"rank 0": rank.pid}) for _ in range(54)]  # less than a minute
            assert found == [None] * 134
            assert "rank 0" in [watch.stopped({"rank 0": rank.pid}) for _ in range(4)]
        finally:
            rank.kill()


def test_a_process_of_a_rank_is_no_orphan() -> None:
    """A script that a rank runs may start `rewrite`: the job's variables are there, and its parent is the rank."""
    inner = "from rewriter.common.processes import end_if_orphaned; end_if_orphaned()"
    outer = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {inner!r}]).returncode)"
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
    assert until(lambda: all(map(is_gone, family)))
    assert until(lambda: left(tmp_path) == [])
    assert not (tmp_path / "out").exists()


def descendants(pid: int) -> list[int]:
    """Without the shell that removes the scratch folder."""
    try:
        own = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        own = [child for child in own if b"/bin/sh" not in Path(f"/proc/{child}/cmdline").read_bytes()]
    except OSError:
        return []
    return own + [below for child in own for below in descendants(child)]


# A rank that is killed


def test_a_killed_rank_is_told_at_once_in_one_line() -> None:
    program = "import os, signal, sys, time; os.kill(os.getpid(), 9) if sys.argv[-2] == '1' else time.sleep(600)"
    with pytest.raises(RewriterError) as failure:
        run_ranks([sys.executable, "-c", program], {}, range(3), timeout=500, about="out: ")
    assert str(failure.value).startswith(
        "out: rank 1 was killed by SIGKILL (signal 9), as the system does where memory"
    )
    assert "\n" not in str(failure.value)


@pytest.mark.slow
def test_nothing_is_left_of_commands_that_succeed(tmp_path: Path) -> None:
    """But for the cache of torch's compiler, which is of the user, not of the run."""
    model, scratch = str(ROOT / "examples/tiny-llama"), tmp_path / "scratch"
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


def test_a_port_is_not_one_that_the_system_gives_to_connections() -> None:
    """A connection that another job opened took it between the choice and rank 0, which then could not listen."""
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = {processes.free_port() for _ in range(8)}
    assert len(found) > 1
    assert all(10_000 <= port < first_given for port in found)

"""The fork server: what it forks runs, is reported and ends like any other process, in an environment of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from rewriter.common import fork_server
from rewriter.common.processes import Processes, environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no fork server on this system")


def _run(tmp_path: Path, source: str, timeout: float = 300.0, **own: str) -> tuple[int, str]:
    """The status and the output of a script."""
    child = _start(tmp_path, source, **own)
    return child.wait(timeout), (tmp_path / "log").read_text()


def _start(tmp_path: Path, source: str, *arguments: str, **own: str) -> fork_server.Forked:
    script = tmp_path / "script.py"
    script.write_text(source)
    with open(tmp_path / "log", "wb") as log:
        child = fork_server.fork(["-P", str(script), *arguments], lambda _: environment(1, **own), log)
    assert child is not None
    return child


def test_a_script_has_its_arguments_environment_and_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "3")  # not for processes of a separate job
    source = (
        "import os, sys, torch\n"
        "print(__name__, sys.argv[1:], os.environ.get('RANK'), os.environ['OWN'], torch.get_num_threads())\n"
        "print(os.getcwd(), sys.stdin.read() == '')\n"
    )
    torch.ones(300, 300) @ torch.ones(300, 300)  # threads of this process
    child = _start(tmp_path, source, "a", OWN="b")
    assert child.wait(300) == 0
    assert (tmp_path / "log").read_text().splitlines() == ["__main__ ['a'] None b 1", f"{tmp_path} True"]


@pytest.mark.parametrize(
    ("source", "status", "said"),
    [
        ("raise ValueError('no')", 1, "ValueError: no"),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('why')", 1, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        ("import os, sys; sys.stdout.write('kept'); sys.exit(0)", 0, "kept"),
    ],
)
def test_the_status_is_python_s(tmp_path: Path, source: str, status: int, said: str) -> None:
    code, output = _run(tmp_path, source)
    assert (code, said in output) == (status, True)


def test_torch_is_there_already_and_rewriter_s_operators_are_not(tmp_path: Path) -> None:
    source = (
        "import sys\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules, 'rewriter.ops' in sys.modules)\n"
        "import torch\n"
        "print(hasattr(torch.ops.rewriter, 'attention'))\n"
    )
    assert _run(tmp_path, source)[1].split() == ["True", "True", "False", "False"]


def test_a_process_ends_when_it_is_told_to_and_with_the_server(tmp_path: Path) -> None:
    source = "import time; print('begun', flush=True); time.sleep(600)"
    child = _start(tmp_path, source)
    assert child.poll() is None
    child.terminate()
    assert child.wait(300) == -signal.SIGTERM

    other = _start(tmp_path, source)
    os.kill(other.parent, signal.SIGKILL)
    assert other.wait(300) == -signal.SIGKILL
    assert _run(tmp_path, "print('again')")[1] == "again\n"  # from a new server


def test_a_failure_is_reported_to_the_job(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from rewriter.common.errors import RewriterError\n"
        "from rewriter.common.processes import reported\n"
        "with reported():\n    raise RewriterError('a tensor is missing')\n"
    )
    with Processes() as job:
        job.fork("rank 0", ["-P", str(script)], environment())
        failure = job.wait(300)
    assert failure is not None
    assert (failure.message, failure.code) == ("a tensor is missing", 2)


@pytest.mark.parametrize("early", [pytest.param(True, marks=pytest.mark.slow), False])
def test_the_server_ends_with_the_process_that_started_it(early: bool) -> None:
    source = (
        "import os, signal\nfrom rewriter.common import fork_server\n"
        f"{'fork_server.start_early()' * early}\n"
        "with open(os.devnull, 'wb') as log:\n"
        "    print(fork_server.fork(['-m', 'this'], lambda _: os.environ, log).parent, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=environment())
    server, limit = int(done.stdout), time.monotonic() + 120
    while Path(f"/proc/{server}").exists() and time.monotonic() < limit:
        time.sleep(0.05)
    assert done.returncode == -signal.SIGKILL
    assert not Path(f"/proc/{server}").exists()

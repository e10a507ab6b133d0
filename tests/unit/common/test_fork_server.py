"""The fork server: what it forks runs and is reported like any other process, in its own environment."""

from __future__ import annotations

import signal
import subprocess
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from job_processes import is_gone, until

from rewriter.common.processes import Processes, environment, fork

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no fork server on this system")


def _run(tmp_path: Path, source: str, **own: str) -> tuple[int | None, str]:
    """The status and the output of a script."""
    child = _start(tmp_path, source, **own)
    child.join(300)
    return child.exitcode, (tmp_path / "log").read_text()


def _start(tmp_path: Path, source: str, *arguments: str, **own: str) -> BaseProcess:
    script = tmp_path / "script.py"
    script.write_text(source)
    return fork(["-P", str(script), *arguments], environment(1, **own), tmp_path / "log")


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
    child.join(300)
    assert child.exitcode == 0
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


@pytest.mark.slow
def test_a_forked_process_has_torch_already_and_ends_with_a_client_that_is_killed(tmp_path: Path) -> None:
    """The client has no other fork server, as this process may, and is a script without `if __name__ == "__main__"`,
    which multiprocessing would run in the fork again. Operators of rewriter are not in the fork."""
    (tmp_path / "script.py").write_text(
        "import os, sys, time\n"
        "loaded = [name in sys.modules for name in ('torch', 'transformers', 'rewriter.ir.ops')]\n"
        "import torch\n"
        "print(*loaded, hasattr(torch.ops.rewriter, 'attention'), flush=True)\n"
        "os.rename('log', 'seen')\n"
        "time.sleep(600)"
    )
    (tmp_path / "client.py").write_text(
        "import os, signal, time\nfrom pathlib import Path\nfrom rewriter.common import processes\n"
        "processes.start_early()\n"
        "print(processes.fork(['-P', 'script.py'], os.environ, Path('log')).pid, flush=True)\n"
        "while not os.path.exists('seen'):\n    time.sleep(0.02)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    words = [sys.executable, "client.py"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), cwd=tmp_path, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (tmp_path / "seen").read_text().split() == ["True", "True", "False", "False"]
    (child,) = map(int, done.stdout.split())
    assert until(lambda: is_gone(child))

"""`python -m rewriter.emulation`: unmodified scripts on some real ranks of an emulated world."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

from rewriter.common.errors import RewriterError
from rewriter.emulation.__main__ import app
from rewriter.emulation.environment import listen

COMMAND = [sys.executable, "-m", "rewriter.emulation"]

DDP = """
import os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
inner, alone = (torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.Linear(300, 2)) for _ in range(2))
model = DistributedDataParallel(inner, bucket_cap_mb=0.01)
alone.load_state_dict(model.module.state_dict())
for step in range(3):
    x = torch.randn(4, 8)
    for one in (model, alone):
        loss = one(x).square().mean()
        loss.backward()
        for p in one.parameters():
            p.data -= 0.1 * p.grad
            p.grad = None
same = all(torch.allclose(a, b) for a, b in zip(model.parameters(), alone.parameters()))
everyone = dist.new_group(backend="gloo")
total = torch.ones(3)
dist.all_reduce(total, group=everyone)
objects = [None] * dist.get_world_size()
dist.all_gather_object(objects, {"rank": 0})
dist.barrier()
found = ("OUT", dist.get_rank(), dist.get_world_size(), dist.get_backend(), same, total.tolist(), objects[-1],
         os.environ["LOCAL_RANK"], sys.argv[1:], __name__)
os.write(1, (" ".join(map(str, found)) + "\\n").encode())  # at once: ranks share the output
dist.destroy_process_group()
"""


def started(script: str, tmp_path: Path, options: Sequence[str], *arguments: str) -> subprocess.Popen[str]:
    path = tmp_path / "script.py"
    path.write_text(script)
    return subprocess.Popen(
        [*COMMAND, *options, str(path), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(script: str, tmp_path: Path, options: Sequence[str], *arguments: str) -> tuple[int, str, str]:
    process = started(script, tmp_path, options, *arguments)
    try:
        out, err = process.communicate(timeout=600)
    finally:
        process.kill()
    return process.returncode, out, err


WIRE = ("--world-size", "8", "--mode", "wire", "--fabric", "unpaced")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["wire", "delay"])
def test_a_stock_ddp_script_runs_unmodified(mode: str, tmp_path: Path) -> None:
    options = (*WIRE, "--real", "0", "--real", "5") if mode == "wire" else ("--world-size", "8")
    code, out, err = ended(DDP, tmp_path, options, "--lr", "0.1")
    assert code == 0, err
    values = "8 emulated True [8.0, 8.0, 8.0] {'rank': 0}"
    expected = [f"OUT 0 {values} 0 ['--lr', '0.1'] __main__"]
    if mode == "wire":
        expected.append(f"OUT 5 {values} 1 ['--lr', '0.1'] __main__")
    assert sorted(line for line in out.splitlines() if line.startswith("OUT")) == expected


UNEQUAL = """
import sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
time.sleep(0.5 * (dist.get_rank() == 4))
dist.all_reduce(torch.ones(1))
print("OUT", dist.get_rank(), flush=True)
if len(sys.argv) < 2:
    dist.destroy_process_group()
else:
    import os
    os._exit(int(sys.argv[1]))
"""


@pytest.mark.slow
def test_classes_of_ranks_run_in_turn_and_the_slowest_is_named(tmp_path: Path) -> None:
    options = ("--world-size", "8", "--real", "0", "--real", "4", "--in-turn")
    code, out, err = ended(UNEQUAL, tmp_path, options)
    assert code == 0, err
    assert [line for line in out.splitlines() if line.startswith("OUT")] == ["OUT 0", "OUT 4"]
    first, second, job = (float(found) for found in re.findall(r"^(?:rank \d|the job): (\S+) s", err, re.MULTILINE))
    assert job == second > first + 0.4
    assert "as long as rank 4" in err
    assert ended(UNEQUAL, tmp_path, options, "3")[0] == 3
    code, _, err = ended(UNEQUAL, tmp_path, options, "0")
    assert code != 0
    assert "destroy_process_group" in err


STUCK = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
print("PID", os.getpid(), os.environ["MASTER_PORT"], flush=True)
if dist.get_rank() == 5:
    time.sleep(0.5)
    sys.exit(7)
dist.all_reduce(torch.ones(4))
"""


@pytest.mark.slow
def test_the_first_failure_ends_all_with_its_exit_code(tmp_path: Path) -> None:
    """Rank 0 waits for rank 5, which ends with 7."""
    code, out, err = ended(STUCK, tmp_path, (*WIRE, "--real", "0", "--real", "5"))
    assert code == 7, err
    assert "rank 5 ended with exit code 7" in err or "rank 5 has left the job" in err
    assert_gone([int(found) for found in re.findall(r"PID (\d+)", out)])


FOREVER = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
print("PID", os.getpid(), os.getppid(), flush=True)
while True:
    dist.all_reduce(torch.ones(4))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["environment", "sigterm", "sigkill"])
def test_no_process_outlives_the_launcher_or_the_environment(how: str, tmp_path: Path) -> None:
    process = started(FOREVER, tmp_path, WIRE)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        pid = int(process.stdout.readline().split()[1])
        served = [child for child in children(process.pid) if child != pid]
        assert len(served) == 1
        if how == "environment":
            os.kill(served[0], signal.SIGKILL)
        else:
            process.send_signal(signal.SIGTERM if how == "sigterm" else signal.SIGKILL)
        code = process.wait(300)
        err = process.stderr.read()
    finally:
        process.kill()
        process.stdout.close()
        process.stderr.close()
    assert_gone([pid, *served])
    if how == "environment":
        assert "the environment process was killed by SIGKILL" in err or "closed the connection" in err
    assert code == {"environment": code or 1, "sigterm": 143, "sigkill": -9}[how]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def assert_gone(pids: Sequence[int]) -> None:
    limit = time.monotonic() + 120
    alive = list(pids)
    assert alive
    while alive and time.monotonic() < limit:
        time.sleep(0.05)
        alive = [pid for pid in alive if Path(f"/proc/{pid}").exists() and state(pid) != "Z"]
    assert not alive


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


def called(*words: str) -> Any:
    return app(list(words), standalone_mode=False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--world-size", "8"), "no script"),
        (("script.py",), "--world-size is missing"),
        (("--world-size", "4", "--real", "9", "s.py"), "rank 9, expected 0 to 3"),
        (("--world-size", "4", "--mode", "telepathy", "s.py"), "'delay' or 'wire'"),
        (("--world-size", "4", "--environment", "h:1", "s.py"), "only --mode wire"),
        (("--world-size", "4", *WIRE[2:], "absent.py"), "absent.py: no such script"),
        (("--world-size", "4", "--fabric", "nowhere", "s.py"), "nowhere"),
        (("--world-size", "4", "--fabric", "unpaced", "s.py"), "unpaced"),
        (("--serve", "nowhere"), "expected HOST:PORT"),
        (("--serve", "127.0.0.1:0", "s.py"), "--serve runs no script"),
    ],
    ids=["script", "size", "real", "mode", "environment", "absent", "fabric", "unpaced", "serve", "served-script"],
)
def test_options_that_make_no_job_are_refused(words: tuple[str, ...], said: str) -> None:
    with pytest.raises((RewriterError, typer.Exit), match=re.escape(said)):
        called(*words)


def test_an_address_that_is_not_ours_is_refused() -> None:
    with pytest.raises(RewriterError, match=r"--serve 203\.0\.113\.1:1: .*address of this machine"):
        listen("203.0.113.1:1")

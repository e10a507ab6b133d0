"""Starts the processes of an emulated job on this machine, as torchrun does, and ends them together."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from rewriter.common.errors import RewriterError
from rewriter.common.version import PACKAGE_PARENT
from rewriter.emulation.config import VARIABLE, EmulationConfig
from rewriter.emulation.heterogeneous import slowest

GRACE_SECONDS = 10.0  # from SIGTERM to SIGKILL
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_POLL = 0.02


class Ended(BaseException):
    """A signal that ends the job."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def launch(config: EmulationConfig, script: Sequence[str], *, as_module: bool = False) -> int:
    """Run `script` (its path or module, and its arguments) on every real rank; the job's exit code.

    0 when all end well. At the first failure all others are stopped, and its exit code, or 128 + its signal, is
    returned. A SIGTERM, SIGINT or SIGHUP stops the job: 128 + the signal. No process outlives this call. Raises
    RewriterError for a script that does not exist.
    """
    if not as_module and not Path(script[0]).is_file():
        raise RewriterError(f"{script[0]}: no such script. Options of the launcher stand before the script's name")
    processes: dict[str, subprocess.Popen[bytes]] = {}
    before = {number: signal.signal(number, _end) for number in _ENDING}
    try:
        if config.mode == "wire" and config.environment is None:
            listener = socket.create_server(("127.0.0.1", 0))
            config = config.model_copy(update={"environment": f"127.0.0.1:{listener.getsockname()[1]}"})
            processes["the environment process"] = _start(
                ["rewriter.emulation.environment_main", str(listener.fileno())], config, {}, listener
            )
            listener.close()
        port = str(_free_port())
        for local, rank in enumerate(config.real):
            command = ["rewriter.emulation.rank_main", *(["-m"] if as_module else []), *script]
            processes[f"rank {rank}"] = _start(command, config, _place(config, rank, local, port))
        return _wait(processes)
    except Ended as ended:
        return 128 + ended.number
    finally:
        for number in _ENDING:
            signal.signal(number, signal.SIG_IGN)
        _stop(list(processes.values()))
        for number, handler in before.items():
            signal.signal(number, handler)


def launch_in_turn(config: EmulationConfig, script: Sequence[str], *, as_module: bool = False) -> int:
    """Run `script` on one real rank after another, each with all others emulated; then say on stderr how long the job
    took on each, and on which longest: so long it takes where classes of ranks differ (NeuronaBox, arXiv 2405.02969,
    section 2.3). For devices that hold one rank at a time. The exit code of the first that fails, else 0.

    A job is from the start of its default process group to its end.
    """
    found: dict[int, float] = {}
    with tempfile.TemporaryDirectory(prefix="emulated-") as directory:
        for rank in config.real:
            file = Path(directory, str(rank))
            alone = config.model_copy(update={"real": (rank,), "seconds_file": str(file)})
            code = launch(alone, script, as_module=as_module)
            if code:
                return code
            if not file.exists():
                raise RewriterError(
                    f"rank {rank}: its process ended, but not its process group, so that it is not known how long it "
                    "took. Let the script call torch.distributed.destroy_process_group()"
                )
            found[rank] = float(file.read_text(encoding="ascii"))
    for rank, seconds in found.items():
        sys.stderr.write(f"rank {rank}: {seconds:.6g} s\n")
    (job,) = slowest({rank: [seconds] for rank, seconds in found.items()})
    sys.stderr.write(f"the job: {job.seconds:.6g} s, as long as rank {job.rank}\n")
    return 0


def _end(number: int, _: FrameType | None) -> None:
    raise Ended(number)


def _start(
    command: list[str], config: EmulationConfig, place: dict[str, str], listener: socket.socket | None = None
) -> subprocess.Popen[bytes]:
    package = str(PACKAGE_PARENT)
    environment = {**os.environ, **place, VARIABLE: config.to_environment()}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    kept = () if listener is None else (listener.fileno(),)
    return subprocess.Popen([sys.executable, "-u", "-m", *command], env=environment, pass_fds=kept)


def _place(config: EmulationConfig, rank: int, local: int, port: str) -> dict[str, str]:
    """The variables by which torchrun tells a rank its place. Local ranks are the real ones: they have the devices."""
    count = str(len(config.real))
    place = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(config.world_size),
        "LOCAL_WORLD_SIZE": count,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(config.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "emulated",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
    if len(config.real) > 1 and "OMP_NUM_THREADS" not in os.environ:
        place["OMP_NUM_THREADS"] = "1"
    return place


def _wait(processes: dict[str, subprocess.Popen[bytes]]) -> int:
    """Until all ranks have ended well, or one process has not."""
    ranks = {name for name in processes if name.startswith("rank")}
    while True:
        codes = {name: process.poll() for name, process in processes.items()}
        for name, code in codes.items():
            # an environment process that ends, however it does, leaves ranks waiting
            if code or (code == 0 and name not in ranks):
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                sys.stderr.write(f"error: {name} {how}. All other processes of the job are stopped\n")
                return -code + 128 if code < 0 else code or 1
        if all(codes[name] == 0 for name in ranks):
            return 0
        time.sleep(_POLL)


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    limit = time.monotonic() + GRACE_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

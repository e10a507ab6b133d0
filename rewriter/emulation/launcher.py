"""Starts the processes of an emulated job on this machine, as torchrun does, and ends them together."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rewriter.common.errors import RewriterError
from rewriter.common.files import scratch_folder
from rewriter.common.processes import EMULATED, Processes, environment, free_port, place
from rewriter.emulation.config import EmulationConfig

_ENVIRONMENT = "the environment process"


def launch(config: EmulationConfig, script: Sequence[str], *, as_module: bool = False) -> int:
    """Run `script` (its path or module, and its arguments) on every real rank; the job's exit code.

    0 when all end well. At the first failure all others are stopped, and its exit code, or 128 + its signal, is
    returned. A SIGTERM or SIGHUP stops the job, with SystemExit(128 + the signal). No process outlives this call.
    Raises RewriterError for a script that does not exist.
    """
    if not as_module and not Path(script[0]).is_file():
        raise RewriterError(f"{script[0]}: no such script. Options of the launcher stand before the script's name")
    with Processes(logged=False) as job:
        if config.mode == "wire" and config.environment is None:
            config = with_environment(job, config)
        port = free_port()
        own = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")} if len(config.real) > 1 else {}
        for local, rank in enumerate(config.real):
            # Local ranks are the real ones: they have the devices.
            variables = place(rank, config.world_size, port, local, len(config.real)) | own
            words = _python("rewriter.emulation.rank_main", *(["-m"] if as_module else []), *script)
            job.start(f"rank {rank}", words, _variables(config, variables))
        failure = job.wait(but=(_ENVIRONMENT,))
        if failure is None:
            return 0
        if failure.message is not None:
            sys.stderr.write(f"error: {failure.message}\n")
        sys.stderr.write(f"error: {failure.name} {failure.how}. All other processes of the job are stopped\n")
        return failure.status


def with_environment(job: Processes, config: EmulationConfig) -> EmulationConfig:
    """`config` with the address of an environment process, which starts as one of `job` and which nobody waits for."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = config.model_copy(update={"environment": f"127.0.0.1:{listener.getsockname()[1]}"})
        words = _python("rewriter.emulation.environment", str(listener.fileno()))
        job.start(_ENVIRONMENT, words, _variables(config, {}), pass_fds=(listener.fileno(),))
    return config


def launch_in_turn(config: EmulationConfig, script: Sequence[str], *, as_module: bool = False) -> int:
    """Run `script` on one real rank after another, each with all others emulated; then say on stderr how long the job
    took on each, and on which longest: so long it takes where classes of ranks differ (NeuronaBox, arXiv 2405.02969,
    section 2.3). For devices that hold one rank at a time. The exit code of the first that fails, else 0.

    A job is from the start of its default process group to its end.
    """
    seconds_of: dict[int, float] = {}
    with scratch_folder("emulated") as directory:
        for rank in config.real:
            file = directory / str(rank)
            alone = config.model_copy(update={"real": (rank,), "seconds_file": str(file)})
            code = launch(alone, script, as_module=as_module)
            if code:
                return code
            if not file.exists():
                raise RewriterError(
                    f"rank {rank}: its process ended, but not its process group, so that it is not known how long it "
                    "took. Let the script call torch.distributed.destroy_process_group()"
                )
            seconds_of[rank] = float(file.read_text(encoding="ascii"))
    for rank, seconds in seconds_of.items():
        sys.stderr.write(f"rank {rank}: {seconds:.6g} s\n")
    longest = max(seconds_of, key=seconds_of.__getitem__)
    sys.stderr.write(f"the job: {seconds_of[longest]:.6g} s, as long as rank {longest}\n")
    return 0


def _python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-u", "-m", module, *arguments]


def _variables(config: EmulationConfig, place: Mapping[str, str]) -> dict[str, str]:
    return {**environment(), **place, EMULATED: config.to_environment()}

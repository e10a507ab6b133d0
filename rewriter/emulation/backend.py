"""The backend "emulated" of torch.distributed: one job per process, until destroy_process_group."""

from __future__ import annotations

import atexit
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rewriter.common.errors import RewriterError
from rewriter.common.processes import EMULATED
from rewriter.emulation.config import EmulationConfig
from rewriter.emulation.delay_cpu import DelayEngine
from rewriter.emulation.delay_cuda import CudaDelayEngine
from rewriter.emulation.group import NAME, EmulatedGroup, compact
from rewriter.emulation.operation import EmulatedOperation
from rewriter.emulation.rendezvous import Rendezvous
from rewriter.emulation.wire_mode import WireEngine
from rewriter.emulation.work import Engine
from rewriter.fabric import DelayModel


class DelayEngines:
    """A DelayEngine for tensors on the CPU and a CudaDelayEngine for each GPU, made when it is first used."""

    def __init__(self, model: DelayModel, rendezvous: Rendezvous | None = None) -> None:
        self.model = model
        self._rendezvous = rendezvous
        self._cpu = DelayEngine(model, rendezvous)
        self._cuda: dict[torch.device, CudaDelayEngine] = {}

    def submit(self, operation: EmulatedOperation) -> Any:
        for x in (*operation.outputs, *operation.inputs):
            if x.is_cuda:
                return self.on(x.device).submit(operation)
        if operation.call.kind == "barrier" and self._cuda:  # after what the GPU has to do
            return self.on(torch.device("cuda", torch.cuda.current_device())).submit(operation)
        return self._cpu.submit(operation)

    def on(self, device: torch.device) -> CudaDelayEngine:
        """The CudaDelayEngine of `device`. Raises RewriterError where several ranks are real: on GPUs their classes
        run in turn."""
        if self._rendezvous is not None:
            raise RewriterError(
                f"emulated backend: several real ranks with tensors on {device}. On GPUs run one real rank at a "
                "time (`python -m rewriter.emulation --in-turn`), and take the slowest"
            )
        if device not in self._cuda:
            self._cuda[device] = CudaDelayEngine(self.model, device)
        return self._cuda[device]

    def change(self, model: DelayModel) -> None:
        """Operations take what `model` says from now on; in CUDA graphs that were captured, too."""
        self.model = self._cpu.model = model
        for engine in self._cuda.values():
            engine.change(model)

    def close(self) -> None:
        self._cpu.close()
        for engine in self._cuda.values():
            engine.close()


@dataclass(frozen=True)
class _EmulatedJob:
    engine: Engine
    real: tuple[int, ...]
    seconds_file: str | None = None
    rendezvous: Rendezvous | None = None
    begun: float = field(default_factory=time.monotonic)


_job: _EmulatedJob | None = None  # from its default group on: its other groups share the engine


def register() -> None:
    """Make `init_process_group("emulated")` known to torch; once is enough, more is allowed.

    REWRITER_EMULATE names what is emulated (see `EmulationConfig`), which the launcher sets, or by `pg_options` of
    init_process_group: an EmulationConfig; or, with this process as the only real rank, a model of delays
    (`rewriter.fabric.DelayModel`) or an Engine.
    """
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, given: Any) -> EmulatedGroup:
    """A process group, as torch asks for it. `options.global_ranks_in_group` is empty for the default group."""
    global _job
    seconds = options.timeout.total_seconds()
    members = list(options.global_ranks_in_group)
    if members:
        if _job is None:
            raise RewriterError('emulated group: the default group is not. Call init_process_group("emulated") first')
        return EmulatedGroup(compact(members), options.group_rank, _job.engine, seconds, options.store, _job.real)
    _close()
    _job = _job_of(given, options, seconds)
    everyone = range(options.group_size)
    return EmulatedGroup(everyone, options.group_rank, _job.engine, seconds, options.store, _job.real, _close)


def _close() -> None:
    global _job
    if _job is not None:
        _job.engine.close()
        if _job.seconds_file is not None:
            Path(_job.seconds_file).write_text(f"{time.monotonic() - _job.begun}", encoding="ascii")
        _job = None


@atexit.register
def _close_at_exit() -> None:
    """Also where a program forgets to: a thread that comes back to an interpreter that is gone would crash. Other ranks
    learn of it with the end of this process, so that a failure's exit code is known before theirs."""
    if _job is not None and _job.rendezvous is not None:
        _job.rendezvous.leaves_last = True
    _close()


def _job_of(given: Any, options: Any, seconds: float) -> _EmulatedJob:
    own = (options.group_rank,)
    if given is None:
        given = EmulationConfig.from_environment()
    if isinstance(given, EmulationConfig):
        return _configured(given, options, seconds)
    if isinstance(given, DelayModel):
        given = DelayEngines(given)
    if isinstance(given, Engine):
        return _EmulatedJob(given, own)
    raise RewriterError(
        f"emulated backend: {EMULATED} is not set, and pg_options is {given!r}. Start the script with "
        "`python -m rewriter.emulation`, or give an EmulationConfig as pg_options"
    )


def _configured(config: EmulationConfig, options: Any, seconds: float) -> _EmulatedJob:
    rank, real = options.group_rank, config.real
    if config.world_size != options.group_size:
        raise RewriterError(
            f"emulated backend: init_process_group has {options.group_size} ranks, but {config.world_size} are emulated"
        )
    if rank not in real:
        raise RewriterError(f"emulated backend: this is rank {rank}, but the real ones are {', '.join(map(str, real))}")
    if config.mode == "wire" and config.environment is None:
        raise RewriterError(
            "emulated backend: mode wire, but no environment process. Start the script with "
            "`python -m rewriter.emulation --mode wire`"
        )
    rendezvous = Rendezvous(options.store, real, rank, seconds) if len(real) > 1 else None
    if config.environment is not None:
        engine = WireEngine(config.environment, rendezvous, config.pace())
        # no other rank's objects travel
        return _EmulatedJob(engine, (rank,), config.seconds_file, rendezvous)
    return _EmulatedJob(DelayEngines(config.delay_model(), rendezvous), real, config.seconds_file, rendezvous)

"""The backend "emulated" of torch.distributed: one job per process, until destroy_process_group."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from rewriter.errors import RewriterError
from rewriter.fabric import DelayModel
from rewriter.runtime.emulated.config import VARIABLE, EmulationConfig
from rewriter.runtime.emulated.engine import Engine
from rewriter.runtime.emulated.group import EmulatedGroup
from rewriter.runtime.emulated.identity import NAME, compact

_engine: Engine | None = None  # of the job, from its default group on: its other groups share it


def register() -> None:
    """Make `init_process_group("emulated")` known to torch; once is enough, more is allowed.

    What is emulated is told by REWRITER_EMULATE (see `EmulationConfig`), which the launcher sets, or by `pg_options` of
    init_process_group: an EmulationConfig, a model of delays (`rewriter.fabric.DelayModel`), or an Engine.
    """
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, given: Any) -> EmulatedGroup:
    """A process group, as torch asks for it. `options.global_ranks_in_group` is empty for the default group."""
    global _engine
    seconds = options.timeout.total_seconds()
    members = list(options.global_ranks_in_group)
    if members:
        if _engine is None:
            raise RewriterError('emulated group: the default group is not. Call init_process_group("emulated") first')
        return EmulatedGroup(compact(members), options.group_rank, _engine, seconds, options.store)
    if _engine is not None:
        _engine.close()
    _engine = _engine_of(given, options)
    return EmulatedGroup(range(options.group_size), options.group_rank, _engine, seconds, options.store, _close)


def _close() -> None:
    global _engine
    if _engine is not None:
        _engine.close()
        _engine = None


def _engine_of(given: Any, options: Any) -> Engine:
    if given is None:
        given = EmulationConfig.from_environment()
    if isinstance(given, EmulationConfig):
        _agree(given, options)
        raise RewriterError("emulated backend: fabrics by name are not known yet")
    if isinstance(given, DelayModel):
        from rewriter.runtime.emulated.delay import DelayEngines

        return DelayEngines(given)
    if isinstance(given, Engine):
        return given
    raise RewriterError(
        f"emulated backend: {VARIABLE} is not set, and pg_options is {given!r}. Start the script with "
        "`python -m rewriter.runtime.emulated`, or give an EmulationConfig as pg_options"
    )


def _agree(config: EmulationConfig, options: Any) -> None:
    if config.world_size != options.group_size:
        raise RewriterError(
            f"emulated backend: init_process_group has {options.group_size} ranks, but {config.world_size} are emulated"
        )
    if options.group_rank not in config.real:
        real = ", ".join(map(str, config.real))
        raise RewriterError(f"emulated backend: this is rank {options.group_rank}, but the real ones are {real}")

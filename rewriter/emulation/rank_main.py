"""Main of each real rank, as the launcher starts it: `python -m rewriter.emulation.rank_main [-m] SCRIPT ARGUMENT…`.

The script runs unmodified. Whatever backend it names, its process groups are emulated, and it finds its store at once:
the other ranks of the world, for which torch would wait, do not exist.
"""

from __future__ import annotations

import inspect
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed import distributed_c10d as c10d

from rewriter.common.errors import RewriterError
from rewriter.common.processes import EMULATED, end_with_job
from rewriter.emulation.backend import register
from rewriter.emulation.config import EmulationConfig


def main(arguments: Sequence[str]) -> None:
    end_with_job()
    config = EmulationConfig.from_environment()
    if config is None:
        raise RewriterError(f"{EMULATED} is not set. Start the script with `python -m rewriter.emulation`")
    as_module, script = arguments[0] == "-m", list(arguments[arguments[0] == "-m" :])
    sys.argv = script
    with emulated(config):
        if as_module:
            sys.path[0] = os.getcwd()
            runpy.run_module(script[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(script[0]).resolve().parent)
            runpy.run_path(script[0], run_name="__main__")


@contextmanager
def emulated(config: EmulationConfig) -> Iterator[None]:
    """Within it, all process groups that torch makes are emulated, no matter which backend is named."""
    register()
    helper: Callable[..., Any] = c10d._new_process_group_helper
    parameters = inspect.signature(helper)

    def make(*positional: Any, **named: Any) -> Any:
        given = parameters.bind(*positional, **named).arguments
        # options are those of the backend that the script names
        options = given.get("backend_options") if str(given["backend"]) == "emulated" else None
        return helper(**{**given, "backend": dist.Backend("emulated"), "backend_options": options})

    def rendezvous(url: str, rank: int = -1, world_size: int = -1, **options: Any) -> Iterator[tuple[Any, int, int]]:
        rank = int(os.environ["RANK"]) if rank < 0 else rank
        world_size = config.world_size if world_size < 0 else world_size
        store: Any = HashStore()
        if len(config.real) > 1:  # for the real ranks; it waits for none that is emulated
            store = TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=rank == config.real[0],
                timeout=options.get("timeout") or timedelta(seconds=config.timeout),
                wait_for_workers=False,
            )
        yield store, rank, world_size

    with (
        mock.patch.object(c10d, "_new_process_group_helper", make),
        mock.patch.object(c10d, "rendezvous", rendezvous),
    ):
        yield


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except RewriterError as error:
        if os.environ.get("REWRITER_DEBUG"):
            raise
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)

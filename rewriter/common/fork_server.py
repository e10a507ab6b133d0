"""Processes forked from multiprocessing's fork server, which imports torch and transformers once: an import takes
seconds, a fork milliseconds. This module imports neither.

What the imports read from the environment is the server's: `OMP_NUM_THREADS` is set again in the forked process.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess, current_process, parent_process
from pathlib import Path

# Of rewriter only this module: the adapted checkpoint is loaded in a process that never saw the rest.
_PRELOADED = (
    "torch.distributed.tensor",
    "torch.fx",
    "safetensors.torch",
    "transformers.modeling_utils",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    __name__,
)
_lock = threading.Lock()  # multiprocessing reads an exit status from a pipe, once, in whichever thread asks first


def available() -> bool:
    """Linux only, as frameworks of other systems do not survive a fork; a daemonic process may start no others."""
    return sys.platform == "linux" and not current_process().daemon


def start_early() -> None:
    """Start the server, which imports while the caller does; without this, the first `fork` starts it."""
    if available():
        _context()
        forkserver.ensure_running()


def _context() -> ForkServerContext:
    context = ForkServerContext()
    if getattr(forkserver._forkserver, "_preload_modules", None) == ["__main__"]:  # a program may have set its own
        context.set_forkserver_preload(list(_PRELOADED))
    return context


def fork(words: Sequence[str], variables: Mapping[str, str], log: Path) -> BaseProcess:
    """Run `python WORDS…` ("-m MODULE …" or "-P SCRIPT …") with `variables` as its environment; it writes to `log`."""
    process = _context().Process(target=_run, args=(list(words), dict(variables), str(log)))
    with _lock:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")  # else multiprocessing runs the caller's script there
        try:
            process.start()
        finally:
            sys.modules["__main__"] = main
    return process


def exit_code(process: BaseProcess) -> int | None:
    """Minus the signal that ended it; None while it runs."""
    with _lock:
        return process.exitcode


def _run(words: list[str], variables: dict[str, str], log: str) -> None:
    """In the forked process: what `python WORDS…` does, ended with the client, even if that is killed."""
    threading.Thread(target=_end_with_client, daemon=True).start()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.clear()
    os.environ.update(variables)
    if threads := os.environ.get("OMP_NUM_THREADS"):
        import torch

        torch.set_num_threads(int(threads))
    how, target, *arguments = words
    sys.argv = [target, *arguments]
    if how == "-m":
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")


def _end_with_client() -> None:
    client = parent_process()
    assert client is not None
    client.join()
    os._exit(1)

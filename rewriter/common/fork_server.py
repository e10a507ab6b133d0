"""Processes forked from multiprocessing's fork server, which imports torch and transformers once: an import takes
seconds, a fork milliseconds. This module imports neither.

    start_early()             # a command that has not imported torch yet forks the server from itself
    process = fork(["-m", "package.module", "argument"], variables, log)

What the imports read from the environment is the server's: `OMP_NUM_THREADS` is set again in the forked process.
"""

from __future__ import annotations

import importlib
import itertools
import os
import runpy
import sys
import threading
import types
import warnings
from collections.abc import Mapping, Sequence
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
    """Import what the server preloads, which the caller needs as well, and fork the server from this process.

    A process that has torch already may have threads, which a fork loses: nothing is done then, and the server is
    started from nothing when it is needed.
    """
    if "torch" in sys.modules or not available():
        return
    from multiprocessing import forkserver, resource_tracker, util
    from unittest import mock

    for name in _PRELOADED:
        importlib.import_module(name)
    resource_tracker.ensure_running()
    with mock.patch.object(util, "spawnv_passfds", _fork_python), warnings.catch_warnings():
        # BLAS libraries have threads by now, and end them before a fork
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        forkserver.ensure_running()


def _fork_python(_: object, words: Sequence[str], passed: Sequence[int]) -> int:
    """Forks what multiprocessing would start as `python … -c CODE`, with the `passed` file descriptors open in it."""
    if pid := os.fork():
        return pid
    try:
        for low, high in itertools.pairwise([2, *sorted(passed), os.sysconf("SC_OPEN_MAX")]):
            os.closerange(low + 1, high)
        exec(words[-1], {})
    finally:
        os._exit(0)


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


def _context() -> ForkServerContext:
    from multiprocessing.forkserver import _forkserver

    context = ForkServerContext()
    if getattr(_forkserver, "_preload_modules", None) == ["__main__"]:  # else the program has set its own, which stay
        context.set_forkserver_preload(list(_PRELOADED))
    return context


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

"""Processes of one job on this machine: their environment, start and end, and why one failed. Imports no torch.

A process that runs within `reported()` hands the reason of its failure back as JSON.
"""

from __future__ import annotations

import ctypes
import json
import math
import multiprocessing
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, Self

from rewriter.common.errors import RewriterError
from rewriter.common.files import replace_text, scratch_folder
from rewriter.common.packages import PACKAGE_PARENT

GRACE_SECONDS = 5.0  # from SIGTERM to SIGKILL
EMULATED = "REWRITER_EMULATE"  # what is emulated, see rewriter.emulation.config
_REPORT = "REWRITER_REPORT"  # PARENT:NAME:FILE, where a process writes why it failed
# cuDNN's attention, which torch prefers on capabilities 9 and 10, plans for every new length of a prompt or a cache,
# for up to half a second. With this, kernels without plans come first. Torch reads it once, before its first attention.
CUDNN_ATTENTION_LAST = ("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
_PLACE = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")
_POLL_SECONDS = 0.02


def environment(ranks: int | None = None, /, **own: str) -> dict[str, str]:
    """The variables of a process of a separate job: this process's, without its place in a world.

    `rewriter` can be imported there, and gloo takes the loopback interface, so that no host name has to resolve. With
    `ranks`, these share the CPU's threads. `own` are set as they are, and what the user has set stays.
    """
    variables = {k: v for k, v in os.environ.items() if not _PLACE.fullmatch(k) and k not in (EMULATED, _REPORT)}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PACKAGE_PARENT), os.environ.get("PYTHONPATH")]))
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        variables.setdefault("GLOO_SOCKET_IFNAME", loopback)
    variables.setdefault(*CUDNN_ATTENTION_LAST)
    if ranks is not None:
        variables.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    return variables | own


def place(rank: int, world: int, port: int, local: int | None = None, locals: int | None = None) -> dict[str, str]:
    """The variables by which torchrun gives a rank its place: `locals` ranks are on this machine (default: all)."""
    local, locals = rank if local is None else local, world if locals is None else locals
    return {
        "RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(locals),
        "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_RANK": str(rank), "ROLE_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
    }  # fmt: skip


def placed(ranks: int) -> Callable[[int], dict[str, str]]:
    """Function of a rank: its `environment` in a world of `ranks` on this machine, as torchrun gives it."""
    port = free_port()
    return lambda rank: environment(ranks, **place(rank, ranks, port))


def local_rank() -> int:
    """This process's number among those of its machine: torchrun's, or SLURM's where `srun` started it; else 0."""
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0")


def free_port() -> int:
    """A TCP port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Failure:
    """The process that failed first. `code`: its exit status, None where it still ran when the time was up. `line`:
    the reason in one line. `message`: of a RewriterError. `details`: its traceback, or the last lines of its output."""

    name: str
    code: int | None
    line: str
    message: str | None
    details: str

    @property
    def how(self) -> str:
        code = self.code or 0
        if code >= 0:
            return f"ended with exit code {code}"
        memory = ", as the system does where memory runs out" if -code == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name} (signal {-code}){memory}"

    @property
    def status(self) -> int:
        """The exit status for who started it: 128 + the signal where one ended it."""
        return 1 if self.code is None else 128 - self.code if self.code < 0 else self.code or 1


class Processes:
    """Processes that end together: leaving the block stops what still runs, SIGTERM first, SIGKILL after `grace` s.

    In the main thread, a SIGTERM or SIGHUP leaves the block with SystemExit(128 + signal). `scratch` is a directory
    that lasts as long as the block. `logged`: outputs go to files in it; otherwise to this process's own.
    """

    def __init__(self, *, logged: bool = True, grace: float = GRACE_SECONDS) -> None:
        self._logged, self._grace = logged, grace
        self._processes: dict[str, subprocess.Popen[bytes] | BaseProcess] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(leaving_on_signals())
        self.scratch = self._stack.enter_context(scratch_folder("job"))
        return self

    def __exit__(self, *_: object) -> None:
        with self._stack:
            for end, seconds in (("terminate", self._grace), ("kill", math.inf)):
                for process in self._running():
                    getattr(process, end)()
                limit = time.monotonic() + seconds
                while self._running() and time.monotonic() < limit:
                    time.sleep(_POLL_SECONDS)

    def start(self, name: str, command: Sequence[str], variables: Mapping[str, str], **options: Any) -> Any:
        """Start `command` with these variables as its environment; `options` are further ones of Popen."""
        with ExitStack() as stack:
            if self._logged:
                log = stack.enter_context(self._log(name).open("wb"))
                options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, **options}
            options = {"env": {**variables, _REPORT: self._report(name)}, **options}
            process = self._processes[name] = subprocess.Popen(command, **options)
        return process

    def fork(self, name: str, words: Sequence[str], variables: Mapping[str, str]) -> None:
        """Start `python WORDS…` ("-m MODULE …" or "-P SCRIPT …") from the fork server, where there is one."""
        if _can_fork():
            variables = {**variables, _REPORT: self._report(name)}
            self._processes[name] = fork(words, variables, self._log(name))
        else:
            self.start(name, [sys.executable, *words], variables)

    def _report(self, name: str) -> str:
        return f"{os.getpid()}:{name}:{self.scratch / name}.failed"

    def _log(self, name: str) -> Path:
        return self.scratch / f"{name}.log"

    def wait(
        self, timeout: float | None = None, but: Sequence[str] = (), tick: Callable[[], None] = lambda: None
    ) -> Failure | None:
        """Until all processes have ended well (None), the first has failed, or `timeout` seconds are over.

        Those named `but` serve the others: nobody waits for their end, and for one to end is a failure. `tick` is
        called every 0.02 s meanwhile.
        """
        limit = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            codes = self._codes()
            for name, code in codes.items():
                if code or (code == 0 and name in but):
                    return self.failure(name, code)
            running = [name for name, code in codes.items() if code is None and name not in but]
            if not running:
                return None
            if time.monotonic() > limit:
                return self.failure(running[0], None)
            tick()
            time.sleep(_POLL_SECONDS)

    def failure(self, name: str, code: int | None) -> Failure:
        """Failure of process `name`, or of the one that reported one before it, or was killed.

        Who is killed reports nothing, and what the others report is that it is gone. An abort may follow from that too.
        """
        codes = {other: status or 0 for other, status in self._codes().items()}
        killed = [other for other, status in codes.items() if status < 0 and status != -signal.SIGABRT]
        reports = [json.loads(path.read_text(encoding="utf-8")) for path in self.scratch.glob("*.failed")]
        if killed and code is not None:
            name, code = killed[0], codes[killed[0]]
        elif reports and code is not None:
            first = min(reports, key=lambda report: report["time"])
            name = first["name"]
            return Failure(name, codes[name] or code, first["line"], first["message"], first["details"])
        output = self._log(name).read_text(encoding="utf-8", errors="replace") if self._logged else ""
        lines = [line for line in output.splitlines() if line.strip()] or ["it printed nothing"]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]
        return Failure(name, code, (errors[:1] or lines[-1:])[0].strip()[:600], None, "\n".join(lines[-30:]))

    def _codes(self) -> dict[str, int | None]:
        return {name: _exit_code(process) for name, process in self._processes.items()}

    def _running(self) -> list[subprocess.Popen[bytes] | BaseProcess]:
        return [process for process in self._processes.values() if _exit_code(process) is None]


def run_ranks(
    command: Sequence[str],
    spec: Mapping[str, Any],
    ranks: Sequence[int],
    *,
    timeout: float | None,
    about: str = "",
    variables: Callable[[int], Mapping[str, str]] = lambda rank: environment(),
    before: Callable[[int], Sequence[str]] = lambda rank: (),
    tick: Callable[[Path], None] = lambda scratch: None,
) -> list[Any]:
    """Run `command`, whose main is `rank_main`, as each of `ranks` at once; returns what each returns.

    `spec` reaches them as JSON, with "store" and "scratch" added: the path of a file store, and a directory that all
    see. `variables`: a rank's environment; `before`: words before its command; `tick` is called with the directory
    again and again meanwhile. Raises RewriterError with the reason of the rank that failed first: the message of its
    RewriterError, else its traceback; and after `timeout` seconds. `about` begins what is said of the latter two.
    """
    with Processes() as job:
        file, results = job.scratch / "spec.json", [job.scratch / f"result-{rank}.json" for rank in ranks]
        write_json(file, {**spec, "store": str(job.scratch / "store"), "scratch": str(job.scratch)})
        for rank, result in zip(ranks, results, strict=True):
            words = [*before(rank), *command, str(file), str(rank), str(result)]
            job.start(f"rank {rank}", words, variables(rank))
        failure = job.wait(timeout, tick=lambda: tick(job.scratch))
        if failure is not None and failure.code is None:
            late = f"{len(ranks)} ranks gave no result in {timeout:g} s, and were stopped"
            raise RewriterError(f"{about}{late}. The last line of {failure.name}: {failure.line}")
        if failure is not None:
            killed = (failure.code or 0) < 0
            said = f"{failure.how}. The others were stopped" if killed else f"failed:\n{failure.details}"
            raise RewriterError(failure.message or f"{about}{failure.name} {said}")
        return [json.loads(result.read_text(encoding="utf-8")) for result in results]


# --- the fork server: to import torch and transformers takes seconds, to fork a process that has them milliseconds.
# What the imports read from the environment is the server's: `OMP_NUM_THREADS` is set again in the forked process.

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


def _can_fork() -> bool:
    """Linux only, as frameworks of other systems do not survive a fork; a daemonic process may start no others."""
    return sys.platform == "linux" and not multiprocessing.current_process().daemon


def _fork_context() -> ForkServerContext:
    context = ForkServerContext()
    if getattr(forkserver._forkserver, "_preload_modules", None) == ["__main__"]:  # a program may have set its own
        context.set_forkserver_preload(list(_PRELOADED))
    return context


def start_early() -> None:
    """Start the fork server, which imports while the caller does; without this, the first fork starts it."""
    if _can_fork():
        _fork_context()
        forkserver.ensure_running()


def fork(words: Sequence[str], variables: Mapping[str, str], log: Path) -> BaseProcess:
    """Run `python WORDS…` ("-m MODULE …" or "-P SCRIPT …") with `variables` as its environment; it writes to `log`."""
    process = _fork_context().Process(target=_forked, args=(list(words), dict(variables), str(log)))
    with _lock:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")  # else multiprocessing runs the caller's script there
        try:
            process.start()
        finally:
            sys.modules["__main__"] = main
    return process


def _exit_code(process: subprocess.Popen[bytes] | BaseProcess) -> int | None:
    if isinstance(process, subprocess.Popen):
        return process.poll()
    with _lock:
        return process.exitcode


def _forked(words: list[str], variables: dict[str, str], log: str) -> None:
    """In the forked process: what `python WORDS…` does, ended with the client, even if that is killed."""
    end_with_parent()
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


# --- in the processes ---

_report_file: tuple[str, str] | None = None  # this process's name and file in the `Processes` that started it


def rank_main(work: Callable[[dict[str, Any], int], Any]) -> None:
    """The main of a process of `run_ranks`: `work(spec, rank)` gives its result, as JSON values."""
    with reported():
        spec, rank, result = sys.argv[-3:]
        write_json(Path(result), work(json.loads(Path(spec).read_text(encoding="utf-8")), int(rank)))


@contextmanager
def reported() -> Iterator[None]:
    """Within it, the process ends with its parent. An exception is reported to it and ends the process at once:
    to leave a process group in order would be to wait for ranks that may never answer."""
    end_with_job()
    try:
        yield
    except BaseException as error:
        details = traceback.format_exc()
        line = traceback.format_exception_only(error)[-1].splitlines()[0]
        report(line, str(error) if isinstance(error, RewriterError) else None, details)
        sys.stderr.write(details)
        sys.stderr.flush()
        os._exit(error.exit_code if isinstance(error, RewriterError) else 1)


def end_with_job() -> bool:
    """True if a `Processes` started this process. If so, it ends when that does, or at once where that is gone already.

    Takes the job's variable out of the environment, since processes that this one starts are not of the job.
    """
    global _report_file
    if (variable := os.environ.pop(_REPORT, None)) is None:
        return _report_file is not None
    parent, name, file = variable.split(":", 2)
    _report_file = name, file
    if multiprocessing.parent_process() is None:  # what is forked ends with its client already
        end_with_parent()
        if os.getppid() != int(parent):
            os._exit(1)
    return True


def end_with_parent() -> None:
    """End when the process that started this one does, even if it is killed; of a forked one, that is its client."""
    if sys.platform == "linux" and multiprocessing.parent_process() is None:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    else:
        threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()


def _watch(parent: int) -> None:
    client = multiprocessing.parent_process()
    while client is None and os.getppid() == parent:
        time.sleep(1)
    if client is not None:
        client.join()
    os._exit(1)


def report(line: str, message: str | None, details: str = "") -> bool:
    """Hand the reason of a failure to the parent, if that is a `Processes`: True if it is."""
    if _report_file is None:
        return False
    name, file = _report_file
    content = {"name": name, "time": time.time(), "line": line[:600], "message": message, "details": details}
    write_json(Path(file), content)
    return True


def write_json(path: Path, content: Any) -> None:
    """Write `content` as JSON, at once, so that a reader never sees half of it."""
    replace_text(path, json.dumps(content))


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """In the main thread, a SIGTERM or SIGHUP within it raises SystemExit(128 + signal), so that what blocks began is
    put in order, as after a Ctrl-C. A handler that the program has set stays."""
    numbers = (signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    changed = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in changed:
        signal.signal(number, _leave)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)

"""Processes of one job on this machine: their environment, start and end, and why one failed. Imports no torch.

    with Processes() as job:                                    # none outlives the block
        variables = placed(2)
        for rank in range(2):
            job.start(f"rank {rank}", command, variables(rank))
        failure = job.wait(timeout=60)                          # None: all ended well

A process that runs within `reported()` hands the reason of its failure back as JSON.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

from rewriter.common import fork_server
from rewriter.common.errors import RewriterError
from rewriter.common.fork_server import end_with_parent
from rewriter.common.scratch import scratch_folder
from rewriter.common.version import PACKAGE_PARENT

GRACE_SECONDS = 10.0  # from SIGTERM to SIGKILL
_RANK_GRACE_SECONDS = 5.0  # the same for ranks of `run_ranks`, which have nothing to save
EMULATED = "REWRITER_EMULATE"  # what is emulated, see rewriter.emulation.config
_REPORT = "REWRITER_REPORT"  # PARENT:NAME:FILE, where a process writes why it failed
# cuDNN's attention, which torch prefers on capabilities 9 and 10, plans for every new length of a prompt or a cache,
# for up to half a second. With this, kernels without plans come first. Torch reads it once, before its first attention.
CUDNN_ATTENTION_LAST = ("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
_PLACE = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")
_POLL_SECONDS = 0.02
STOPPED_SECONDS = 60.0  # after which a process that stands still by a signal counts as failed
_LOOK_SECONDS = 1.0  # between two looks at who stands still


def environment(ranks: int | None = None, /, **own: str) -> dict[str, str]:
    """The variables of a process of a separate job: this process's, without its place in a world.

    `rewriter` can be imported there, and gloo takes the loopback interface, so that no host name has to resolve. With
    `ranks`, these share the CPU's threads. `own` are set as they are, and what the user has set stays.
    """
    found = {k: v for k, v in os.environ.items() if not _PLACE.fullmatch(k) and k not in (EMULATED, _REPORT)}
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PACKAGE_PARENT), os.environ.get("PYTHONPATH")]))
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        found.setdefault("GLOO_SOCKET_IFNAME", loopback)
    found.setdefault(*CUDNN_ATTENTION_LAST)
    if ranks is not None:
        found.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    return found | own


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
    """By rank its `environment` in a world of `ranks` on this machine, as torchrun gives it."""
    port = free_port()
    return lambda rank: environment(ranks, **place(rank, ranks, port))


def local_rank() -> int:
    """This process's number among those of its machine: torchrun's, or SLURM's where `srun` started it; else 0."""
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0")


def free_port() -> int:
    """A TCP port of this machine that nothing listens on.

    It lies below those that the system gives to connections, so that none takes it before a rank listens there.
    """
    try:
        first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first_given = 0  # no Linux
    below = range(10_000, first_given)
    tried = random.SystemRandom().sample(below, min(64, len(below)))
    for port in (*tried, 0):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise RewriterError("no TCP port of 127.0.0.1 is free. End other jobs, and try again")


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
        if -code == signal.SIGSTOP:
            return f"was stopped by a signal for {STOPPED_SECONDS:g} s, while the others waited for it"
        memory = ", as the system does where memory runs out" if -code == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name} (signal {-code}){memory}"

    @property
    def status(self) -> int:
        """The exit status for who started it: 128 + the signal where one ended it."""
        return 1 if self.code is None else 128 - self.code if self.code < 0 else self.code or 1


class Processes:
    """Processes that end together: leaving the block stops what still runs, SIGTERM first, SIGKILL after `grace` s.

    In the main thread, a SIGTERM or SIGHUP leaves the block with SystemExit(128 + signal). `scratch` is a directory
    that lasts as long as the block, or as this process if that is killed. `logged`: outputs go to files in it;
    otherwise to this process's own.
    """

    def __init__(self, *, logged: bool = True, grace: float = GRACE_SECONDS) -> None:
        self._logged, self._grace = logged, grace
        self._processes: dict[str, subprocess.Popen[bytes] | fork_server.Forked] = {}
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._folder = scratch_folder("job")
        self.scratch = self._folder.__enter__()
        self._handlers = _leave_on_signals()
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._handlers:
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C does not leave processes behind
        try:
            self._stop()
            self._folder.__exit__(None, None, None)
        finally:
            _restore(self._handlers)

    def start(self, name: str, command: Sequence[str], variables: Mapping[str, str], **options: Any) -> Any:
        """Start `command` with these variables as its environment; `options` are further ones of Popen."""
        options = {"env": {**variables, _REPORT: self._report(name, os.getpid())}, **options}
        if not self._logged:
            process = subprocess.Popen(command, **options)
        else:
            with self._log(name).open("wb") as log:
                streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                process = subprocess.Popen(command, **{**streams, **options})
        self._processes[name] = process
        return process

    def fork(self, name: str, words: Sequence[str], variables: Mapping[str, str]) -> None:
        """Start `python WORDS…` ("-m MODULE …" or "-P SCRIPT …") from the fork server, where there is one."""
        with self._log(name).open("wb") as log:
            child = fork_server.fork(words, lambda parent: {**variables, _REPORT: self._report(name, parent)}, log)
        if child is None:
            self.start(name, [sys.executable, *words], variables)
        else:
            self._processes[name] = child

    def _report(self, name: str, parent: int) -> str:
        return f"{parent}:{name}:{self.scratch / name}.failed"

    def wait(
        self, timeout: float | None = None, but: Sequence[str] = (), tick: Callable[[], None] = lambda: None
    ) -> Failure | None:
        """Until all processes have ended well (None), the first has failed, or `timeout` seconds are over.

        Those named `but` serve the others: nobody waits for their end, and for one to end is a failure. One that a
        signal stops for `STOPPED_SECONDS` has failed, with code -SIGSTOP. `tick` is called again and again meanwhile.
        """
        limit = float("inf") if timeout is None else time.monotonic() + timeout
        watch = _Watch()
        while True:
            codes = {name: process.poll() for name, process in self._processes.items()}
            for name, code in codes.items():
                if code or (code == 0 and name in but):
                    return self.failure(name, code)
            running = [name for name, code in codes.items() if code is None and name not in but]
            if not running:
                return None
            if (stopped := watch.stopped({name: self._processes[name].pid for name in running})) is not None:
                return self.failure(stopped, -signal.SIGSTOP)
            if time.monotonic() > limit:
                return self.failure(running[0], None)
            tick()
            time.sleep(_POLL_SECONDS)

    def failure(self, name: str, code: int | None) -> Failure:
        """Why process `name` failed, or the one that reported a failure before it, or was killed.

        Who is killed reports nothing, and what the others report is that it is gone. An abort may follow from that too.
        """
        reports = [json.loads(path.read_text(encoding="utf-8")) for path in self.scratch.glob("*.failed")]
        codes = {other: process.poll() or 0 for other, process in self._processes.items()}
        killed = [other for other, found in codes.items() if found < 0 and found != -signal.SIGABRT]
        if killed and code is not None:
            name, code = killed[0], codes[killed[0]]
        elif reports and code is not None:
            first = min(reports, key=lambda report: report["time"])
            ended = self._processes[first["name"]].poll()
            return Failure(first["name"], ended or code, first["line"], first["message"], first["details"])
        output = self._log(name).read_text(encoding="utf-8", errors="replace") if self._logged else ""
        lines = [line for line in output.splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]
        line = (errors or lines or ["it printed nothing"])[0 if errors else -1].strip()
        return Failure(name, code, line[:600], None, "\n".join(lines[-30:]) or "it printed nothing")

    def _log(self, name: str) -> Path:
        return self.scratch / f"{name}.log"

    def _stop(self) -> None:
        running = [process for process in self._processes.values() if process.poll() is None]
        for process in running:
            process.terminate()
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)  # one that stands still hears nothing
        limit = time.monotonic() + self._grace
        for process in running:
            try:
                process.wait(max(0.0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class _Watch:
    """Who of some processes has stood still, by a signal, for `STOPPED_SECONDS`: the others wait for it. One that ran
    between two looks did not: it may be slowed by stops, as cpulimit slows. The time in which the watcher itself did
    not look does not count: a job may be stopped as a whole, and go on."""

    def __init__(self) -> None:
        self._still: dict[str, float] = {}  # seconds
        self._runs: dict[str, int | None] = {}
        self._looked = time.monotonic()

    def stopped(self, running: Mapping[str, int]) -> str | None:
        """The name of one of the `running` processes, whose ids are given."""
        now = time.monotonic()
        passed = now - self._looked
        if passed < _LOOK_SECONDS:
            return None
        self._looked = now
        for name, pid in running.items():
            before, self._runs[name] = self._runs.get(name), _runs_of_stopped(pid)
            stands = before is not None and before == self._runs[name]
            self._still[name] = self._still.get(name, 0.0) + min(passed, 2 * _LOOK_SECONDS) if stands else 0.0
            if self._still[name] >= STOPPED_SECONDS:
                return name
        return None


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
    with Processes(grace=_RANK_GRACE_SECONDS) as job:
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


# --- in the processes ---


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


def end_with_job() -> None:
    """End when the process that started this one does, even if it is killed; at once where its job is over already."""
    end_with_parent()
    end_if_orphaned()


def end_if_orphaned() -> None:
    """End at once where the `Processes` that this process belongs to was killed before that could be asked for."""
    parent = _reports_to()[0]
    if parent and not is_child() and _is_gone(parent):
        os._exit(1)


def is_child() -> bool:
    """Whether a `Processes` started this process."""
    return _reports_to()[0] == os.getppid()


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # another user's now
        return False
    return state_of(pid) in ("Z", "X")  # ended, and nobody has asked for its status yet


def _runs_of_stopped(pid: int) -> int | None:
    """How often a process that a signal has stopped was on a processor until then (proc(5), context switches); None for
    one that is not stopped, and where that cannot be known."""
    if state_of(pid) != "T":
        return None
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return sum(map(int, re.findall(r"ctxt_switches:\s*(\d+)", text)))


def state_of(pid: int) -> str:
    """The letter by which Linux names the state of a process (proc(5)): "T" where a signal stopped it; "" where that
    cannot be known."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]


def report(line: str, message: str | None, details: str = "") -> bool:
    """Hand the reason of a failure to the parent, if that is a `Processes`; whether it is."""
    if not is_child():
        return False
    _, name, file = _reports_to()
    content = {"name": name, "time": time.time(), "line": line[:600], "message": message, "details": details}
    write_json(Path(file), content)
    return True


def _reports_to() -> tuple[int, str, str]:
    parent, name, file = (os.environ.get(_REPORT) or "0::").split(":", 2)
    return int(parent), name, file


def write_json(path: Path, content: Any) -> None:
    """At once, so that a reader never sees half of it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content), encoding="utf-8")
    partial.replace(path)


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """In the main thread, a SIGTERM or SIGHUP within it raises SystemExit(128 + signal), so that what blocks began is
    put in order, as after a Ctrl-C. A handler that the program has set stays."""
    before = _leave_on_signals()
    try:
        yield
    finally:
        _restore(before)


def _leave_on_signals() -> dict[int, Any]:
    """Lets signals leave; returns the handlers before that, none where this is not the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    before: dict[int, Any] = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    }
    for number, handler in before.items():
        if handler is signal.SIG_DFL and number != signal.SIGINT:
            signal.signal(number, _leave)
    return before


def _restore(handlers: Mapping[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)

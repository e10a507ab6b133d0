"""A process that imports torch and transformers once, and forks others of a job: an import takes seconds, a fork
milliseconds. Imports neither itself.

    start_early()                          # a command that has not imported torch yet forks the server from itself
    child = fork(["-m", "package.module", "argument"], variables, log)      # None: this system has no server

A forked process runs the module or script as `python` does, with its own environment, and the server ends with the
process that started it. The server computes nothing, so that no thread of its is lost in a fork. What the imports read
from the environment stays as it was for the server: `OMP_NUM_THREADS` is set again in the forked process.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import IO, Any, NoReturn

from rewriter.common.version import PACKAGE_PARENT

# rewriter is not among them: the adapted checkpoint is loaded in a process that never saw it
_PRELOADED = (
    "torch.distributed.tensor",
    "torch.fx",
    "safetensors.torch",
    "transformers.modeling_utils",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
)
_POLL_SECONDS = 0.01
_PDEATHSIG = 1  # of prctl


class Forked:
    """A process that the server forked, with the part of Popen's interface that `Processes` uses."""

    def __init__(self, status: int, parent: int) -> None:
        self._status, self._read = status, b""
        self.parent = parent
        self.returncode: int | None = None
        while b"\n" not in self._read and self.returncode is None:
            select.select([status], [], [])
            self._receive()
        self.pid = int(self._read.split(b"\n")[0] or 0)

    def poll(self) -> int | None:
        """Its exit status, minus the signal that ended it; None while it runs."""
        while self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self._receive()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired after `timeout` seconds."""
        limit = float("inf") if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > limit:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            time.sleep(_POLL_SECONDS)
        return code

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _receive(self) -> None:
        """More of "PID\\nSTATUS\\n". The server was killed, and its children with it, where nothing more comes."""
        found = os.read(self._status, 64)
        self._read += found
        if self._read.count(b"\n") == 2 or not found:
            self.returncode = int(self._read.split(b"\n")[1]) if found else -signal.SIGKILL
            os.close(self._status)


class _Server:
    """The server as its client sees it."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection, self.pid, self.owner = connection, pid, os.getpid()

    def fork(self, words: Sequence[str], variables: Callable[[int], Mapping[str, str]], log: IO[bytes]) -> Forked:
        own = dict(variables(self.pid))
        content = json.dumps({"words": list(words), "variables": own, "directory": os.getcwd()}).encode()
        status, theirs = os.pipe()
        try:
            socket.send_fds(self.connection, [len(content).to_bytes(8, "big")], [theirs, log.fileno()])
            self.connection.sendall(content)
        except OSError:
            os.close(status)
            raise
        finally:
            os.close(theirs)
        return Forked(status, self.pid)


_lock = threading.Lock()
_current: _Server | None = None


def fork(words: Sequence[str], variables: Callable[[int], Mapping[str, str]], log: IO[bytes]) -> Forked | None:
    """Run `python WORDS…` ("-m MODULE …" or "-P SCRIPT …"), its output going to `log`; None where that cannot be.

    `variables` gives its whole environment by the server's PID, which is its parent.
    """
    global _current
    if not _supported():
        return None
    with _lock:
        try:
            return _get().fork(words, variables, log)
        except OSError:  # somebody ended the server
            _current = None
            return _get().fork(words, variables, log)


def start_early() -> None:
    """Import what the server preloads, which the caller needs as well, and fork the server from this process.

    A process that has torch already may have threads, which a fork loses: nothing is done then, and the server is
    started from nothing when it is needed.
    """
    global _current
    if "torch" in sys.modules or not _supported():
        return
    _preload()
    with _lock, warnings.catch_warnings():
        # BLAS libraries have threads by now, and end them before a fork
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        if (pid := os.fork()) == 0:
            ours.close()
            _ending(partial(_serve, theirs))
        theirs.close()
        _current = _Server(ours, pid)


def _supported() -> bool:
    """Frameworks of other systems do not survive a fork."""
    return sys.platform == "linux"


def _get() -> _Server:
    global _current
    if _current is None or _current.owner != os.getpid():
        ours, theirs = socket.socketpair()
        found = os.pathsep.join(filter(None, [str(PACKAGE_PARENT), os.environ.get("PYTHONPATH")]))
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "rewriter.common.fork_server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": found},
            )  # fmt: skip
        process.returncode = 0  # its end is nobody's concern
        _current = _Server(ours, process.pid)
    return _current


# --- in the server and in what it forks ---


def end_with_parent() -> None:
    """End when the process that started this one does, even if it is killed."""
    if os.uname().sysname == "Linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
        return
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _preload() -> None:
    for name in _PRELOADED:
        importlib.import_module(name)


def _serve(connection: socket.socket) -> None:
    """Fork what `connection` asks for, and say how each ended, until the client is gone."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the client, who ends what it started
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, int] = {}
    while True:
        ready = select.select([connection, wake], [], [])[0]
        if wake in ready:
            wake.recv(4096)
            _reap(children)
        if connection in ready:
            head, fds, *_ = socket.recv_fds(connection, 8, 2)
            if not head:
                return  # and children end with this process
            content = _exactly(connection, int.from_bytes(head + _exactly(connection, 8 - len(head)), "big"))
            status, log = fds
            if (pid := os.fork()) == 0:
                for kept in (connection, wake, woken):
                    kept.close()
                for other in (*children.values(), status):
                    os.close(other)
                _ending(partial(_run, json.loads(content), log))
            os.close(log)
            os.write(status, b"%d\n" % pid)
            children[pid] = status


def _exactly(connection: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        if not (more := connection.recv(count - len(found))):
            raise EOFError("the client ended within a request")
        found += more
    return bytes(found)


def _reap(children: dict[int, int]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with contextlib.suppress(BrokenPipeError):
            os.write(children[pid], b"%d\n" % os.waitstatus_to_exitcode(status))
        os.close(children.pop(pid))


def _run(request: Mapping[str, Any], log: int) -> None:
    """What `python WORDS…` does, in this process."""
    end_with_parent()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(request["variables"])
    os.chdir(request["directory"])
    if threads := os.environ.get("OMP_NUM_THREADS"):
        sys.modules["torch"].set_num_threads(int(threads))
    how, target, *arguments = request["words"]
    sys.argv = [target, *arguments]
    if how == "-m":
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")


def _ending(work: Callable[[], None]) -> NoReturn:
    """Do `work` and end the process, with the status that Python gives it; nothing of the client's process is left."""
    code = 1
    try:
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _preload()
    _ending(partial(_serve, socket.socket(fileno=int(sys.argv[1]))))

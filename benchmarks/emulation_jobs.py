"""Processes at the ends of a link, a core each: what the benchmarks of emulation start.

On a machine that others share, the same step takes up to a tenth longer a minute later. So jobs that are compared can
be started together, and each step is done by one after another while the others wait: what is compared is seconds
apart. `Turns` is what one rank of such a job waits for.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from namespaces import INTERFACE, Link

from rewriter.common.errors import RewriterError

HERE = Path(__file__).resolve().parent
SECONDS = 600.0  # that a start, a turn or an end may take


class Turns:
    """The rank's end, at `path`: JSON lines over a Unix socket, which network namespaces do not keep apart."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._lines = self._socket.makefile("rw", encoding="utf-8")

    def tell(self, what: Any) -> None:
        self._lines.write(json.dumps(what) + "\n")
        self._lines.flush()

    def wait(self) -> None:
        """Until it is this job's turn. Raises EOFError where the benchmark is gone."""
        if not self._lines.readline():
            raise EOFError("the benchmark has ended")


class Job:
    """Commands of Python at the ends of `link` from `end` on, each on a core of its own; the first `real` of them are
    waited for.

    Raises RewriterError, with what the processes said, where one fails or takes too long.
    """

    number = 0

    def __init__(
        self,
        link: Link,
        cores: Sequence[int],
        commands: Sequence[Sequence[str]],
        what: str,
        real: int,
        directory: Path,
        end: int = 0,
    ) -> None:
        Job.number += 1
        self.what, self.real = what, real
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": str(29700 + Job.number % 100),
            "WORLD_SIZE": str(real),
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs = [directory / f"log-{Job.number}-{number}" for number in range(len(commands))]
        self._connection: socket.socket | None = None
        for rank, command in enumerate(commands):
            # taskset before Python: gloo's own threads, and torch's, inherit it
            words = [*link.inside(end + rank), "taskset", "-c", str(cores[end + rank]), sys.executable, *command]
            if rank >= real:  # it stands for the network, which waits for no core
                words = ["nice", "-n", "-15", *words]
            own = {"RANK": str(rank), "LOCAL_RANK": "0"} if real > 1 else {}
            with self._logs[rank].open("wb") as log:
                self._processes.append(
                    subprocess.Popen(
                        words, env={**environment, **own}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                    )
                )

    def connected(self, server: socket.socket) -> Any:
        """Wait until its rank has come to `server`: what it tells first."""
        server.settimeout(0.1)
        deadline = time.monotonic() + SECONDS
        while self._connection is None:
            try:
                self._connection = server.accept()[0]
            except TimeoutError:
                if any(process.poll() is not None for process in self._processes) or time.monotonic() > deadline:
                    raise self._failed() from None
        self._connection.settimeout(SECONDS)
        self._lines = self._connection.makefile("rw", encoding="utf-8")
        return self.told()

    def go(self) -> None:
        """Let it do its next step."""
        try:
            self._lines.write("\n")
            self._lines.flush()
        except OSError:
            raise self._failed() from None

    def told(self) -> Any:
        """What it tells next."""
        try:
            line = self._lines.readline()
        except OSError:  # it takes too long, or is gone
            line = ""
        if not line:
            raise self._failed()
        return json.loads(line)

    def wait(self) -> None:
        """Until the ranks have ended."""
        deadline = time.monotonic() + SECONDS
        while any(process.poll() is None for process in self._processes[: self.real]):
            if any(process.poll() for process in self._processes) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        if any(process.poll() != 0 for process in self._processes[: self.real]):
            raise self._failed()

    def stop(self) -> None:
        """End what still runs."""
        if self._connection is not None:
            self._connection.close()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _failed(self) -> RewriterError:
        status = [process.poll() for process in self._processes[: self.real]]
        said = "\n".join(
            f"command {rank}: {log.read_text(errors='replace').strip()[-2500:]}" for rank, log in enumerate(self._logs)
        )
        return RewriterError(f"emulation: {self.what} ended with {status}:\n{said}")

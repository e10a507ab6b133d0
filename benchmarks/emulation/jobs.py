"""Processes at the ends of a link, a core each: what the benchmarks of emulation start.

On a machine that others share, the same step takes up to a tenth longer a minute later. So jobs that are compared can
be started together, and each step is done by one after another while the others wait: what is compared is seconds
apart. `Turns` is what one rank of such a job waits for.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.support.link_ranks import variables
from benchmarks.support.namespaces import Link
from rewriter.common.errors import RewriterError
from rewriter.common.processes import Failure, Processes

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
        end: int = 0,
    ) -> None:
        Job.number += 1
        self.what, self.real = what, real
        place = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": str(29700 + Job.number % 100), "WORLD_SIZE": str(real)}
        self._processes = Processes()
        self._commands = len(commands)
        self._connection: socket.socket | None = None
        self._processes.__enter__()
        for rank, command in enumerate(commands):
            # taskset before Python: gloo's own threads, and torch's, inherit it
            words = [*link.inside(end + rank), "taskset", "-c", str(cores[end + rank]), sys.executable, *command]
            if rank >= real:  # it stands for the network, which waits for no core
                words = ["nice", "-n", "-15", *words]
            own = {"RANK": str(rank), "LOCAL_RANK": "0"} if real > 1 else {}
            self._processes.start(f"command {rank}", words, variables(link, **place, **own))

    def connected(self, server: socket.socket) -> Any:
        """Wait until its rank has come to `server`: what it tells first."""
        server.settimeout(0.1)
        deadline = time.monotonic() + SECONDS
        while self._connection is None:
            try:
                self._connection = server.accept()[0]
            except TimeoutError:
                failure = self._ended(0)
                if failure is None or failure.code is not None or time.monotonic() > deadline:
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
        if self._ended(SECONDS) is not None:
            raise self._failed()

    def stop(self) -> None:
        """End what still runs."""
        if self._connection is not None:
            self._connection.close()
        self._processes.__exit__(None, None, None)

    def _ended(self, seconds: float) -> Failure | None:
        return self._processes.wait(seconds, but=[f"command {rank}" for rank in range(self.real, self._commands)])

    def _failed(self) -> RewriterError:
        failure = self._ended(0)
        said = "it ended" if failure is None else f"{failure.name} failed:\n{failure.details}"
        return RewriterError(f"emulation: {self.what}: {said}")

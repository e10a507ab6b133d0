"""The environment process of the wire mode: it plays all emulated ranks (NeuronaBox, arXiv 2405.02969, section 2.2).

Real ranks connect to it and announce their operations. For each, it knows the messages that the rank will send and
those that the rank waits for (`plan`). It checks that each message is the expected one, and reports an error to the
rank if it is not. It sends a message (of zeros) when its predecessors are done, not before the moment at which the
delay model lets it pass. Nothing that it keeps grows with the number of emulated ranks.

It is started by `python -m rewriter.emulation --serve HOST:PORT`, or by the launcher, which gives it a socket that
listens already: `python -m rewriter.emulation.environment DESCRIPTOR`.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import time
from functools import partial

from rewriter.common.errors import RewriterError
from rewriter.common.processes import end_with_job
from rewriter.emulation.config import EmulationConfig
from rewriter.emulation.exchange import Announced, Connection, Loop, MessageExchange
from rewriter.emulation.wire_mode import endpoint
from rewriter.fabric import DelayModel, Links
from rewriter.fabric.calls import directed_delay

# What may pass within these seconds passes now: a rank that is woken for every message of a short operation would be
# late. Its last message says when the operation may end.
_EARLY = 5e-4


class Played(MessageExchange):
    """The part that the environment has in one operation of a real rank, which takes from `begin` to `end`."""

    def __init__(self, announced: Announced, begin: float, end: float) -> None:
        plan, call = announced.plan, announced.call
        super().__init__(f"{call.kind} of {call.nbytes} bytes among {call.size} ranks", plan.receives, plan.sends)
        self._announced, self._begin, self._end = time.monotonic(), begin, end
        self._passed, self._total = 0, plan.received_bytes

    def moment(self) -> float:
        """Messages are spread over the time that the collective takes."""
        share = self._passed / self._total if self._total else 0.0
        return self._begin + share * (self._end - self._begin) - _EARLY

    def due(self) -> int:
        """With the last message; at least 1."""
        self._passed += self.sends[self.sent - 1].length
        return max(1, round((self._end - self._announced) * 1e9)) if self.sent == len(self.sends) else 0


class Environment(Loop):
    """Serves real ranks on `listener`, a socket that listens; all others are played.

    `model`: says what a collective takes; without one, messages are sent as soon as they may be, and the wire sets the
    time. `run` serves until `stop` is called by another thread or a signal handler.
    """

    def __init__(self, listener: socket.socket, model: DelayModel | None = None) -> None:
        super().__init__()
        listener.setblocking(False)
        self._listener, self._model = listener, model
        self._links: dict[int, Links] = {}  # of each real rank, as in delay mode

    def serve(self) -> None:
        with self._listener:
            self.run(self._listener)

    def look(self) -> None:
        with contextlib.suppress(OSError):  # nobody is there, or is gone already
            connection = Connection(self._listener.accept()[0])
            connection.heard = partial(self._heard, connection)
            self.connections.append(connection)

    def _heard(self, connection: Connection, type: int, body: bytes) -> None:
        """A rank calls a collective: from now on it takes its time."""
        announced = Announced.unpacked(body)
        call, begin = announced.call, time.monotonic()
        end, rank = begin, call.ranks[announced.rank]
        if self._model is not None:
            delay = directed_delay(self._model, call, rank, call.kind == "send" and announced.rank == 1)
            begin, end, self._links[rank] = self._links.get(rank, Links()).occupy(begin, delay)
        connection.exchanges.append(Played(announced, begin, end))

    def failed(self, connection: Connection, error: Exception) -> None:
        if not isinstance(error, OSError):  # else it is gone
            name = "" if isinstance(error, RewriterError) else f"{type(error).__name__}: "
            connection.report(f"{name}{error}")
        if not self.connections:  # the job is over; another may follow
            self._links.clear()


def serve(listener: socket.socket, config: EmulationConfig) -> None:
    """Play all ranks that are not real until SIGTERM or SIGINT."""
    environment = Environment(listener, config.pace())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: environment.stop())
    environment.serve()


def listen(address: str) -> socket.socket:
    """A socket that listens at "host:port". Raises RewriterError where it cannot."""
    host, port = endpoint(address)
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise RewriterError(f"--serve {address}: {error}. Take an address of this machine and a free port") from None


if __name__ == "__main__":
    end_with_job()
    given = EmulationConfig.from_environment()
    assert given is not None
    serve(socket.socket(fileno=int(sys.argv[1])), given)

"""The environment process of the wire mode: it plays all emulated ranks (papers/neuronabox.md, section 2.2).

Real ranks connect to it and announce their operations. For each, it knows the messages that the rank will send and
those that the rank waits for (`plan`). It checks that each message is the expected one, and reports an error to the
rank if it is not. It sends a message (of zeros) when its predecessors are done and all real ranks of the group have
come, not before the moment at which the delay model lets it pass, in turns over all operations that are under way.
Nothing that it keeps grows with the number of emulated ranks.

It is started by `python -m rewriter.emulation --serve HOST:PORT`, or by the launcher, which gives it a socket that
listens already: `python -m rewriter.emulation.environment DESCRIPTOR`.
"""

from __future__ import annotations

import contextlib
import math
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from rewriter.common.errors import RewriterError
from rewriter.common.processes import end_with_job
from rewriter.emulation.config import EmulationConfig
from rewriter.emulation.frames import DATA, FRAME, Announced, FrameHeader
from rewriter.emulation.peer import Peer, Played
from rewriter.emulation.wire_mode import endpoint
from rewriter.fabric import DelayModel, Links
from rewriter.fabric.rank_groups import directed_delay

_SPIN = 1.5e-4  # seconds before a moment from which on it is watched: a sleep may be as late as this
# What may pass within so many seconds passes now: a rank that is woken for every frame of a short operation would be
# late. Its last message says when the operation may end.
_EARLY = 5e-4
_ZEROS = memoryview(bytes(FRAME))


class Environment:
    """Serves real ranks on `listener`, a socket that listens; all ranks that they do not call real are played.

    `model`: says what a collective takes; without one, messages are sent as soon as they may be, and the wire sets the
    time. `run` serves until `stop` is called by another thread or a signal handler.
    """

    def __init__(self, listener: socket.socket, model: DelayModel | None = None) -> None:
        listener.setblocking(False)
        self._listener, self._model = listener, model
        self._links: dict[int, Links] = {}  # of each real rank, as in delay mode
        self._peers: dict[int, Peer] = {}
        self._active: deque[Played] = deque()  # operations with messages to send
        self._gates: dict[tuple[object, ...], list[Played]] = {}  # that not all real ranks have called yet
        self._gone: set[tuple[str, int]] = set()  # (group, rank) whose connection has ended
        self._wake, self._waker = socket.socketpair()
        self._stopped = False

    def run(self) -> None:
        try:
            while not self._stopped:
                self._poll(self._serve())
        finally:
            for peer in self._peers.values():
                peer.socket.close()
            for other in (self._listener, self._wake, self._waker):
                other.close()

    def stop(self) -> None:
        """Make `run` return. Safe in a signal handler."""
        with contextlib.suppress(OSError):  # it has returned already
            self._waker.send(b"\0")

    # --- what comes ---

    def _poll(self, timeout: float | None) -> None:
        """Take in what has come, at most `timeout` seconds from now (None: until something comes)."""
        readers: list[Any] = [self._listener, self._wake, *self._peers]
        writers = [number for number, peer in self._peers.items() if peer.pending]
        readable, writable, _ = select.select(readers, writers, [], timeout)
        for number in writable:
            self._guarded(self._peers[number], self._peers[number].flush)
        for one in readable:
            if one is self._listener:
                self._accept()
            elif one is self._wake:
                self._stopped = True
            elif one in self._peers:
                peer = self._peers[one]
                self._guarded(peer, partial(peer.read, partial(self._begin, peer)))

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # it is gone already
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._peers[connection.fileno()] = Peer(connection)

    def _guarded(self, peer: Peer, action: Callable[[], None]) -> None:
        """Let `peer` read or flush; where that fails, it gets the reason, and is left."""
        try:
            action()
        except RewriterError as error:
            peer.report(str(error))
            self._leave(peer)
        except OSError:
            self._leave(peer)
        except Exception as error:  # no matter what one rank sends, the others' jobs go on
            peer.report(f"environment: {type(error).__name__}: {error}")
            self._leave(peer)

    def _leave(self, peer: Peer) -> None:
        if self._peers.get(peer.number) is not peer:
            return
        del self._peers[peer.number]
        peer.socket.close()
        self._active = deque(played for played in self._active if played.peer is not peer)
        if peer.hello is None:
            return
        self._gone.add((peer.hello.group, peer.hello.rank))
        for key, waiting in list(self._gates.items()):
            left = [played for played in waiting if played.peer is not peer]
            if len(left) < len(waiting) or key[0] == peer.hello.group:
                del self._gates[key]
                for played in left:
                    self._refuse(played, f"rank {peer.hello.rank} has left the job")
        if not self._peers:  # the job is over; another may follow
            self._gone.clear()
            self._links.clear()

    def _refuse(self, played: Played, reason: str) -> None:
        played.peer.report(f"{played.title}: {reason}")
        self._leave(played.peer)

    # --- operations ---

    def _begin(self, peer: Peer, number: int, announced: Announced) -> None:
        """A rank calls a collective: it starts when all real ranks of its group have."""
        hello = peer.hello
        assert hello is not None
        call = announced.call(hello.members)
        if announced.rank >= call.size or call.size < 2:
            raise RewriterError(f"rank {announced.rank} of a group of {call.size}: expected a rank below it")
        played = Played(peer, number, call, announced.rank, announced.plan(call.size))
        peer.operations[number] = played
        members = len(hello.real)
        if members <= 1:
            self._start([played])
            return
        key: tuple[object, ...] = (hello.group, announced.sequence)
        if call.kind == "send":  # the two ends count different operations; messages of a tag keep their order
            turn = peer.turns[announced.tag] = peer.turns.get(announced.tag, -1) + 1
            key = (hello.group, call.ranks, announced.tag, turn)
        gate = self._gates.setdefault(key, [])
        gate.append(played)
        first = gate[0]
        absent = [rank for rank in hello.real if (hello.group, rank) in self._gone]
        if (call.kind, call.nbytes) != (first.call.kind, first.call.nbytes):
            reason = f"rank {first.rank} calls {first.title}, rank {played.rank} {played.title}"
        elif absent:
            reason = f"rank {absent[0]} has left the job"
        else:
            if len(gate) == members:
                self._start(gate)  # where that fails, the others at the gate get the reason
                del self._gates[key]
            return
        del self._gates[key]
        for one in gate:
            self._refuse(one, reason)

    def _start(self, gate: list[Played]) -> None:
        """All have come: from now on the collective takes its time."""
        now = time.monotonic()
        for played in gate:
            begin = end = now
            if self._model is not None:
                delay = directed_delay(self._model, played.call, played.rank, played.receives)
                links = self._links.get(played.rank, Links())
                begin, end, self._links[played.rank] = links.occupy(now, delay)
            played.start(begin, end)
            self._active.append(played)

    # --- what goes ---

    def _serve(self) -> float | None:
        """Send all that may be sent now, operations in turn. The seconds until more may be; None: more must come."""
        while not self._stopped:
            sent, earliest = False, math.inf
            now = time.monotonic()
            for _ in range(len(self._active)):
                if not self._active:  # a connection ended meanwhile
                    break
                played = self._active.popleft()
                if self._peers.get(played.peer.number) is not played.peer:
                    continue
                if not played.peer.pending and played.ready:
                    moment = played.moment - _EARLY
                    if moment <= now:
                        self._send(played, now)
                        sent = True
                    else:
                        earliest = min(earliest, moment)
                if not played.sent.over:
                    self._active.append(played)
            if not sent and earliest - now > _SPIN:
                return None if earliest == math.inf else earliest - now - _SPIN
            self._poll(0.0)
        return 0.0

    def _send(self, played: Played, now: float) -> None:
        """One turn of an operation: the next frame, and others after it as long as they are no more than one large."""
        peer, room = played.peer, FRAME
        while True:
            index, offset, length = played.sent.next()
            room -= length
            played.sent.advance(length)
            due = played.due if played.sent.over else 0
            peer.pending.append(memoryview(FrameHeader(played.number, DATA, index, length, offset, due).pack()))
            if length:
                peer.pending.append(_ZEROS[:length])
            if played.sent.over or not played.ready or played.moment - _EARLY > now:
                break
            if played.sent.next()[2] > room:
                break
        self._guarded(peer, peer.flush)
        if played.over:
            peer.operations.pop(played.number, None)


def serve(listener: socket.socket, config: EmulationConfig) -> None:
    """Play all ranks that are not real until SIGTERM or SIGINT."""
    environment = Environment(listener, config.pace())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: environment.stop())
    environment.run()


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

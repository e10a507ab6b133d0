"""Messages between a real rank and the environment process in wire mode: their format, and the loop that both ends run.

A rank opens one connection for each of its process groups, as gloo does, and one for each pair of ranks between which
it sends single messages. It says of each operation what it is (`Announced`); then both ends know which messages will
pass (`plan`), and send each when those before it are through. Operations of one connection follow each other. An error
is sent where something else than the expected message came. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter

from rewriter.common.errors import RewriterError
from rewriter.emulation.plan import SEGMENT, Plan, PlannedMessage, plan
from rewriter.fabric import Call, Kind

DATA, ANNOUNCE, ERROR = range(3)
ZEROS = memoryview(bytes(SEGMENT))

_HEADER = struct.Struct("<HBxIQ")
_MAGIC = 0x5202  # of this version
_LIMIT = 1 << 26  # bytes of JSON or text: a group of some million ranks that is no range
_READS = 16  # from one connection, before others get their turn
_SCRATCH = memoryview(bytearray(SEGMENT))
_DROP = getattr(socket, "MSG_TRUNC", 0) if sys.platform == "linux" else 0  # read, but do not copy
_SPIN = 1.5e-4  # seconds before a moment from which on it is watched: a sleep may be as late as this


class Announced(NamedTuple):
    """An operation of the rank with index `rank` in `ranks`, its group's global ones; [start, stop, step] if a range.
    `root` is an index, too. `nbytes` has a limit, since a plan has a message for each MiB."""

    kind: Kind
    nbytes: Annotated[int, Field(ge=0, le=1 << 38)]
    itemsize: Annotated[int, Field(ge=1, le=64)]
    ranks: tuple[int, ...]
    is_range: bool
    rank: Annotated[int, Field(ge=0)]
    root: int | None
    dtype: str

    @classmethod
    def of(cls, call: Call, itemsize: int, rank: int, root: int | None) -> Announced:
        is_range, r = isinstance(call.ranks, range), call.ranks
        ranks = (r.start, r.stop, r.step) if isinstance(r, range) else r
        return cls(call.kind, call.nbytes, itemsize, ranks, is_range, rank, root, call.dtype)

    @property
    def call(self) -> Call:
        return Call(self.kind, self.nbytes, range(*self.ranks) if self.is_range else self.ranks, self.dtype)

    @property
    def plan(self) -> Plan:
        return plan(self.kind, self.nbytes, self.itemsize, self.call.size, self.rank, self.root)

    def packed(self) -> bytes:
        return _ANNOUNCED.dump_json(self)

    @classmethod
    def unpacked(cls, body: bytes) -> Announced:
        """Raises RewriterError for what is none."""
        try:
            announced = _ANNOUNCED.validate_json(body)
            if not announced.rank < announced.call.size > 1:
                raise ValueError(f"rank {announced.rank} of a group of {announced.call.size}")
        except (TypeError, ValueError) as error:  # pydantic's is a ValueError
            raise RewriterError(f"an operation that cannot be read: {error}") from None
        return announced


_ANNOUNCED = TypeAdapter(Announced)


def frame(type: int, body: bytes | memoryview, due: int = 0) -> list[bytes | memoryview]:
    """A header and what follows it. `due`: nanoseconds from the operation's announcement until it may end, or 0."""
    head = _HEADER.pack(_MAGIC, type, len(body), due)
    return [head, body] if len(body) else [head]


class MessageExchange:
    """One end's part of an operation: of `sends` and `receives`, the first `sent` and `received` are through. (The
    paper has a bitmap; messages of one direction follow each other here.) An end says what its messages hold, when they
    may pass, and what is done with those that come."""

    def __init__(self, title: str, sends: tuple[PlannedMessage, ...], receives: tuple[PlannedMessage, ...]) -> None:
        self.title, self.sends, self.receives = title, sends, receives
        self.sent = self.received = 0

    @property
    def over(self) -> bool:
        return self.sent == len(self.sends) and self.received == len(self.receives)

    def moment(self) -> float:
        """From when on the next message may pass, seconds of `time.monotonic`."""
        return 0.0

    def content(self, message: PlannedMessage) -> memoryview:
        return ZEROS[: message.length]

    def due(self) -> int:
        """Nanoseconds to tell with the message that was sent last, see `frame`."""
        return 0

    def place(self, message: PlannedMessage) -> memoryview | None:
        """Memory for the bytes of a message; None: they are not looked at."""
        return None

    def arrived(self, message: PlannedMessage, due: int) -> None:
        """All bytes of a message are here."""

    def end(self) -> None:
        """All messages are through."""


class Connection:
    """One socket, which never blocks, with its operations under way in order.

    `heard(type, body)` is called with each frame that is no message of an operation.
    """

    heard: Callable[[int, bytes], None]

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.fileno = connection, connection.fileno
        self.exchanges: deque[MessageExchange] = deque()
        self.pending: deque[bytes | memoryview] = deque()  # on its way out
        self._header = memoryview(bytearray(_HEADER.size))
        self._expect(self._header, _HEADER.size, self._header_arrived)

    def send(self, now: float) -> float:
        """Send what may pass at `now`, as far as the socket takes it. When more may, if nothing comes before."""
        room, moment = SEGMENT, now
        while not self.pending or room < SEGMENT:
            one = next((one for one in self.exchanges if one.sent < len(one.sends)), None)
            ready = one is not None and one.sends[one.sent].needs <= one.received
            moment = one.moment() if one is not None and ready else math.inf
            if one is None or moment > now or room <= 0:
                break
            message = one.sends[one.sent]
            one.sent += 1
            room -= message.length
            self.pending.extend(frame(DATA, one.content(message), one.due()))
        try:
            self._flush()
        except OSError:
            while self.receive():  # the other end may have said why
                pass
            raise
        while not self.pending and self.exchanges and self.exchanges[0].over:
            self.exchanges.popleft().end()
        return math.inf if self.pending else moment

    def _flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.pending:
                count = self.socket.sendmsg([self.pending[i] for i in range(min(512, len(self.pending)))])
                while self.pending and count >= len(self.pending[0]):
                    count -= len(self.pending.popleft())
                if count:
                    self.pending[0] = memoryview(self.pending[0])[count:]

    def report(self, text: str) -> None:
        """Report an error to the other end, as far as that is still possible."""
        self.pending.extend(frame(ERROR, text.encode()))
        with contextlib.suppress(OSError):
            self.socket.settimeout(1.0)
            self._flush()
            self.socket.shutdown(socket.SHUT_WR)

    def take(self) -> bool:
        """Take in what has come, as far as others need not wait for long. As `receive`."""
        return all(self.receive() for _ in range(_READS))

    def receive(self) -> bool:
        """Take in some of the header or body that is expected next; whether anything had come.

        Raises RewriterError for what is not expected, ConnectionError at the connection's end.
        """
        into = _SCRATCH[: self._left] if self._place is None else self._place[-self._left :]
        try:
            count = self.socket.recv_into(into, 0, _DROP if self._place is None else 0)
        except BlockingIOError:
            return False
        if not count:
            raise ConnectionError("the connection was closed")
        self._left -= count
        while not self._left:
            self._arrived()
        return True

    def _expect(self, place: memoryview | None, length: int, arrived: Callable[[], None]) -> None:
        """`length` bytes, into the end of `place` if that is given; then `arrived` is called, and expects more."""
        self._place, self._left, self._arrived = place, length, arrived

    def _header_arrived(self) -> None:
        magic, type, length, due = _HEADER.unpack(self._header)
        if magic != _MAGIC:
            raise RewriterError("a connection of another program, or of another version of this one")
        if type == DATA:
            one = next((one for one in self.exchanges if one.received < len(one.receives)), None)
            if one is None:
                raise RewriterError(f"a message of {length} bytes: no such operation was announced")
            message = one.receives[one.received]
            if length != message.length:
                expected = f"expected message {one.received}, {message.length} bytes"
                raise RewriterError(f"{one.title}: a message of {length} bytes, {expected}")
            self._expect(one.place(message), length, partial(self._message_arrived, one, message, due))
        elif length > _LIMIT:
            raise RewriterError(f"a frame of type {type} with {length} bytes: more than any has")
        else:
            body = bytearray(length)
            self._expect(memoryview(body), length, partial(self._frame_arrived, type, body))

    def _message_arrived(self, one: MessageExchange, message: PlannedMessage, due: int) -> None:
        self._expect(self._header, _HEADER.size, self._header_arrived)
        one.received += 1
        one.arrived(message, due)

    def _frame_arrived(self, type: int, body: bytearray) -> None:
        self._expect(self._header, _HEADER.size, self._header_arrived)
        self.heard(type, bytes(body))


class Loop:
    """Serves `connections` in one thread. `failed` says what to do with one that has ended."""

    def __init__(self) -> None:
        self.connections: list[Connection] = []
        self.stopped = False
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)

    def failed(self, connection: Connection, error: Exception) -> None:
        raise NotImplementedError

    def look(self) -> None:
        """Take in other work: called before every turn, and so after every `wake`."""

    def wake(self) -> None:
        """From any thread, or a signal handler."""
        with contextlib.suppress(OSError):  # full, which wakes too; or over already
            self._wake.send(b"\0")

    def stop(self) -> None:
        self.stopped = True
        self.wake()

    def run(self, *others: Any) -> None:
        """Serve until `stop`. `others`: sockets that begin a turn, too, when they can be read."""
        while not self.stopped:
            self.look()
            now = time.monotonic()
            moments = [self._guarded(one, partial(one.send, now)) for one in list(self.connections)]
            first = min(moments, default=math.inf)
            timeout = None if first == math.inf else max(0.0, first - now - _SPIN)
            writers = [one for one in self.connections if one.pending]
            readable, _, _ = select.select([self._woken, *others, *self.connections], writers, [], timeout)
            for one in readable:
                if one is self._woken:
                    self._woken.recv(1 << 12)
                elif isinstance(one, Connection):
                    self._guarded(one, one.take)
        for one in self.connections:
            one.socket.close()
        self._wake.close()
        self._woken.close()

    def _guarded(self, connection: Connection, action: Callable[[], float]) -> float:
        try:
            return action()
        except Exception as error:  # of any kind: the others go on
            self.connections.remove(connection)
            self.failed(connection, error)
            connection.socket.close()
            return math.inf

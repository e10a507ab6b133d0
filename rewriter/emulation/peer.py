"""A real rank as the environment process sees it: its connection, and its part of each operation."""

from __future__ import annotations

import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable

from rewriter.common.errors import RewriterError
from rewriter.emulation import frames
from rewriter.emulation.plan import Plan
from rewriter.fabric.calls import Call

_SCRATCH = memoryview(bytearray(1 << 20))  # what a rank sends is not read


class Played:
    """The part that the environment has in one operation of one real rank.

    The paper's bitmap of messages: as those of one direction follow each other, the number that are through suffices.
    """

    __slots__ = ("announced", "begin", "call", "end", "number", "peer", "rank", "received", "sent", "started", "total")

    def __init__(self, peer: Peer, number: int, call: Call, rank: int, found: Plan) -> None:
        self.peer, self.number, self.call = peer, number, call
        self.rank = call.ranks[rank]
        self.received, self.sent = frames.Position(found.sends), frames.Position(found.receives)
        self.total = found.received_bytes
        self.announced = time.monotonic()
        self.begin = self.end = 0.0
        self.started = False

    @property
    def receives(self) -> bool:
        return self.call.kind == "send" and self.rank == self.call.ranks[1]

    @property
    def title(self) -> str:
        return f"{self.call.kind} of {self.call.nbytes} bytes among {self.call.size} ranks"

    def start(self, begin: float, end: float) -> None:
        self.begin, self.end, self.started = begin, end, True

    @property
    def ready(self) -> bool:
        return self.started and self.sent.messages[self.sent.done].needs <= self.received.done

    @property
    def moment(self) -> float:
        """From when on the next frame may pass: frames are spread over the time that the collective takes."""
        share = self.sent.bytes / self.total if self.total else 0.0
        return self.begin + share * (self.end - self.begin)

    @property
    def due(self) -> int:
        """Nanoseconds from its announcement to its end, at least 1."""
        return max(1, round((self.end - self.announced) * 1e9))

    @property
    def over(self) -> bool:
        return self.sent.over and self.received.over


class Peer:
    """A connection of a real rank. `pending`: bytes on their way to it, of one frame at most, and reports."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self.number = connection, connection.fileno()
        self.hello: frames.Hello | None = None
        self.operations: dict[int, Played] = {}
        self.turns: dict[int, int] = {}  # messages by tag
        self.pending: deque[memoryview] = deque()
        self._staged = bytearray()
        self._frame: tuple[Played, frames.FrameHeader] | None = None  # whose bytes are coming
        self._left = 0  # of them

    def flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.pending:
                count = self.socket.sendmsg(self.pending)
                while self.pending and count >= len(self.pending[0]):
                    count -= len(self.pending.popleft())
                if count:
                    self.pending[0] = self.pending[0][count:]

    def report(self, text: str) -> None:
        """Report an error to the rank, as far as that is still possible."""
        body = text.encode()
        self.pending.extend((memoryview(frames.FrameHeader(0, frames.ERROR, 0, len(body), 0).pack()), memoryview(body)))
        with contextlib.suppress(OSError):
            self.socket.settimeout(1.0)
            for view in self.pending:
                self.socket.sendall(view)
            self.socket.shutdown(socket.SHUT_WR)
        self.pending.clear()

    def read(self, begin: Callable[[int, frames.Announced], None]) -> None:
        """Take in what has come; `begin` is called for each operation that is announced. Raises RewriterError for a
        message that is not the expected one, ConnectionError at the end."""
        with contextlib.suppress(BlockingIOError):
            if self._left:
                count = self.socket.recv_into(_SCRATCH, min(self._left, len(_SCRATCH)), frames.DROP)
                self._left -= count
                if count and not self._left:
                    self._arrived()
            else:
                some = self.socket.recv(frames.STAGED)
                count = len(some)
                self._staged += some
                self._parse(begin)
            if not count:
                raise ConnectionError("closed")

    def _parse(self, begin: Callable[[int, frames.Announced], None]) -> None:
        if self.hello is None and not self._greeted():
            return
        staged, at = self._staged, 0
        while len(staged) - at >= frames.HEADER and not self._left:
            head = frames.header(staged, at)
            here = min(head.length, len(staged) - at - frames.HEADER)
            if head.type == frames.ANNOUNCE:
                if head.length > frames.ANNOUNCED_LIMIT:
                    raise RewriterError(
                        f"an operation announced with {head.length} bytes: expected less than a hundred"
                    )
                if here < head.length:
                    break
                body = bytes(staged[at + frames.HEADER :][:here])
                begin(head.operation, frames.Announced.unpack(body))
            else:
                self._expect(head)
                self._left = head.length - here
                if not self._left:
                    self._arrived()
            at += frames.HEADER + here
        del staged[:at]

    def _arrived(self) -> None:
        assert self._frame is not None
        played, head = self._frame
        played.received.advance(head.length)
        if played.over:
            self.operations.pop(played.number, None)

    def _expect(self, head: frames.FrameHeader) -> None:
        played = self.operations.get(head.operation)
        got = f"message {head.message}, {head.length} bytes at {head.offset}"
        if head.type != frames.DATA or played is None:
            raise RewriterError(f"{got} of operation {head.operation}: no such operation was announced")
        if played.received.over:
            raise RewriterError(f"{played.title}, rank {played.rank}: got {got}, expected none: all have come")
        index, offset, length = played.received.next()
        if (head.message, head.offset, head.length) != (index, offset, length):
            raise RewriterError(
                f"{played.title}, rank {played.rank}: got {got}, expected message {index}, {length} bytes at {offset}"
            )
        self._frame = (played, head)

    def _greeted(self) -> bool:
        """Whether the greeting is there, which comes first."""
        staged, start = self._staged, len(frames.MAGIC) + 4
        if bytes(staged[: len(frames.MAGIC)]) != frames.MAGIC[: len(staged)]:
            raise RewriterError("environment: a connection of another program, or of another version of this one")
        length = int.from_bytes(staged[len(frames.MAGIC) : start], "little")
        if length > frames.HELLO_LIMIT:
            raise RewriterError(f"environment: a Hello of {length} bytes, expected at most {frames.HELLO_LIMIT}")
        if len(staged) < start + length:
            return False
        self.hello = frames.Hello.unpack(bytes(staged[start : start + length]))
        del staged[: start + length]
        return True

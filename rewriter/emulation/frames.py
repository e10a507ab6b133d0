"""How messages of the wire mode travel: a header of fixed size, then bytes. Both ends are of the same machine type.

A rank opens one connection for each of its process groups, as gloo does, and one for each pair of ranks between which
it sends single messages, and introduces itself with JSON (`Hello`).
Then it sends, for each operation, an `Announced` and the messages of its plan; the environment sends messages too, and
an error where something else than the expected message came. A message is cut into frames of at most `FRAME` bytes, so
that operations that are under way at the same time share the connection evenly. Nothing is unpickled.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rewriter.common.errors import RewriterError
from rewriter.emulation.plan import Plan, PlannedMessage, plan
from rewriter.fabric.calls import KINDS, Call

FRAME = 256 << 10
MAGIC = b"REWRITER-WIRE-1\n"
ANNOUNCED_LIMIT = 1 << 12
HELLO_LIMIT = 64 << 20  # a group of some million ranks that is no range
BYTES_LIMIT = 1 << 38  # of an operation: its plan has messages for each MiB
STAGED = 16 << 10  # read at once where headers and small messages come
DROP = getattr(socket, "MSG_TRUNC", 0) if sys.platform == "linux" else 0  # read, but do not copy
DATA, ANNOUNCE, ERROR = range(3)

_HEADER = struct.Struct("<IBxxxIIQQ")
_ANNOUNCED = struct.Struct("<BBHiIQQQ")
HEADER = _HEADER.size


class FrameHeader(NamedTuple):
    """`operation`: its number on this connection. `message`: its index in the plan. `length`: bytes that follow, at
    `offset` of the message. `due`: nanoseconds from the operation's announcement until it may end, or 0."""

    operation: int
    type: int
    message: int
    length: int
    offset: int
    due: int = 0

    def pack(self) -> bytes:
        return _HEADER.pack(*self)


def header(buffer: memoryview | bytes | bytearray, at: int) -> FrameHeader:
    return FrameHeader._make(_HEADER.unpack_from(buffer, at))


class Hello(BaseModel):
    """Who opens a connection. `ranks`: global ranks of the group; [start, stop, step] where they are a range. `real`:
    those of them that are real, this one among them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: Annotated[int, Field(ge=0)]
    group: str
    ranks: tuple[Annotated[int, Field(ge=0)], ...]
    is_range: bool = False
    real: tuple[int, ...]

    @classmethod
    def of(cls, rank: int, group: str, ranks: tuple[int, ...] | range, real: Sequence[int]) -> Hello:
        among = tuple(r for r in real if r in ranks)
        if isinstance(ranks, range):
            numbers = (ranks.start, ranks.stop, ranks.step)
            return cls(rank=rank, group=group, ranks=numbers, is_range=True, real=among)
        return cls(rank=rank, group=group, ranks=ranks, real=among)

    @property
    def members(self) -> tuple[int, ...] | range:
        return range(*self.ranks) if self.is_range else self.ranks

    def pack(self) -> bytes:
        body = self.model_dump_json().encode()
        return MAGIC + len(body).to_bytes(4, "little") + body

    @classmethod
    def unpack(cls, body: bytes) -> Hello:
        """Raises RewriterError for what is none."""
        try:
            hello = cls.model_validate_json(body)
            if hello.is_range:
                range(*hello.ranks)
        except (ValidationError, TypeError, ValueError) as error:
            raise RewriterError(f"environment: a connection began with something else than a Hello: {error}") from None
        return hello


class Announced(NamedTuple):
    """An operation as the environment gets to know it. `rank` and `root`: indices in the connection's ranks."""

    kind_index: int
    itemsize: int
    root: int | None
    rank: int
    nbytes: int
    sequence: int
    tag: int
    dtype: str

    def pack(self) -> bytes:
        kind, itemsize, root, *numbers, dtype = self
        return _ANNOUNCED.pack(kind, itemsize, len(dtype), -1 if root is None else root, *numbers) + dtype.encode()

    @classmethod
    def unpack(cls, body: bytes) -> Announced:
        """Raises RewriterError for what is none."""
        try:
            kind, itemsize, letters, root, rank, nbytes, sequence, tag = _ANNOUNCED.unpack_from(body)
            dtype = body[_ANNOUNCED.size :].decode()
            if len(dtype) != letters or kind >= len(KINDS) or itemsize == 0 or nbytes > BYTES_LIMIT:
                raise ValueError(f"kind {kind}, {nbytes} bytes in items of {itemsize}")
        except (struct.error, ValueError) as error:
            raise RewriterError(f"environment: an operation that cannot be read: {error}") from None
        return cls(kind, itemsize, None if root < 0 else root, rank, nbytes, sequence, tag, dtype)

    def call(self, members: tuple[int, ...] | range) -> Call:
        return Call(KINDS[self.kind_index], self.nbytes, members, self.dtype)

    def plan(self, ranks: int) -> Plan:
        return plan(KINDS[self.kind_index], self.nbytes, self.itemsize, ranks, self.rank, self.root)


@dataclass(slots=True)
class Position:
    """How far a chain of messages has come, in frames. `done`: messages that are through; `bytes`: of all of them."""

    messages: tuple[PlannedMessage, ...]
    done: int = 0
    offset: int = 0
    bytes: int = 0

    @property
    def over(self) -> bool:
        return self.done == len(self.messages)

    def next(self) -> tuple[int, int, int]:
        """(index, offset, length) of the frame that comes next. Only where it is not over."""
        left = self.messages[self.done].length - self.offset
        return self.done, self.offset, left if left < FRAME else FRAME

    def advance(self, length: int) -> None:
        self.offset += length
        self.bytes += length
        if self.offset >= self.messages[self.done].length:
            self.done += 1
            self.offset = 0

"""A real rank's connection to the environment process, for one process group."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from rewriter.common.errors import RewriterError
from rewriter.emulation import frames
from rewriter.emulation.operation import EmulatedOperation
from rewriter.emulation.plan import SEGMENT, Plan
from rewriter.emulation.work import CollectiveAborted, EmulatedWork
from rewriter.fabric.calls import KINDS

_AT_ONCE = 512  # buffers in one call; systems take 1,024


class WireWork(EmulatedWork):
    """An operation whose messages have all arrived may still have to last: `arrive` gives the time."""

    due = 0.0

    def arrive(self, due: float) -> None:
        """All messages are through; it ends at `due`, seconds of `time.monotonic`, or later, or now."""
        self.due = due
        if self.deadline() <= time.monotonic():
            self.finish()
            return
        self.ready()
        if self.awaited_as_future:
            self._timer.add(self)

    def deadline(self) -> float:
        return self.due if self.underway is None else max(self.due, self._progress.end(self.underway))


class _ChannelExchange:
    """An operation under way."""

    __slots__ = ("due", "filled", "number", "operation", "received", "sent", "source", "target", "unsent", "work")

    def __init__(self, operation: EmulatedOperation, work: WireWork, found: Plan) -> None:
        self.operation, self.work = operation, work
        self.sent, self.received = frames.Position(found.sends), frames.Position(found.receives)
        self.number = -1
        self.unsent = 0  # frames that wait for room in the socket
        self.filled = False
        self.due = 0
        # What is sent is read where it is. Several tensors, or strided ones, which gloo would copy together first:
        # the bytes of any other memory take as long.
        flat = _flat(operation.inputs)
        self.source = None if flat is None else _bytes(flat)
        self.target: Tensor | None = None
        if any(message.reduced for message in found.receives):
            # A reduction sums up in the tensor itself; a reduce_scatter, as torch's gloo, in a copy of its input.
            self.target = flat.clone() if flat is not None and operation.call.kind == "reduce_scatter" else flat

    @property
    def over(self) -> bool:
        return self.received.over and self.sent.over and not self.unsent


class EnvironmentChannel:
    """Two threads: one reads, sums up, and sends what follows; the other writes what the socket did not take at once.

    `begin` may be called from several threads. After an error all operations under way and all later ones fail.
    """

    def __init__(self, connection: socket.socket, hello: frames.Hello, address: str) -> None:
        self._socket, self._address = connection, address
        self._closed = f"the environment process at {address} closed the connection. Its output, if any, says why"
        self._exchanges: dict[int, _ChannelExchange] = {}
        self._next = 0
        self._lock = threading.RLock()  # of the exchanges, and of the order in which frames are queued
        self._queue: deque[tuple[memoryview, _ChannelExchange | None]] = deque()
        self._writable = threading.Condition(self._lock)
        self._error: BaseException | None = None
        self._segment = torch.empty(SEGMENT + 16, dtype=torch.uint8)  # where what is to be summed up arrives
        self._room = _bytes(self._segment)
        self._zeros = memoryview(bytes(frames.FRAME))
        connection.sendall(hello.pack())
        for target, name in ((self._read, "reads"), (self._write, "writes")):
            threading.Thread(target=target, name=f"emulated-{hello.group}-{name}", daemon=True).start()

    def begin(self, operation: EmulatedOperation, work: WireWork) -> None:
        """Announce `operation` and send what needs nothing else before it."""
        call = operation.call
        tensors = operation.inputs or operation.outputs
        announced = frames.Announced(
            kind_index=KINDS.index(call.kind),
            itemsize=max((t.element_size() for t in tensors), default=1),
            root=operation.root,
            rank=operation.rank,
            nbytes=call.nbytes,
            sequence=operation.sequence,
            tag=operation.tag,
            dtype=call.dtype,
        )
        exchange = _ChannelExchange(operation, work, announced.plan(call.size))
        body = announced.pack()
        with self._lock:
            if self._error is not None:
                raise CollectiveAborted(f"{operation.title}: {self._error}") from None
            number = exchange.number = self._next
            self._next = (number + 1) % (1 << 32)
            self._exchanges[number] = exchange
            first = frames.FrameHeader(number, frames.ANNOUNCE, 0, len(body), 0).pack() + body
            self._send([(memoryview(first), None), *self._allowed(number, exchange)])

    def close(self) -> None:
        """End the connection; operations under way fail."""
        self._fail("the process group was destroyed meanwhile")

    # --- sending: with the lock held ---

    def _allowed(self, number: int, exchange: _ChannelExchange) -> list[tuple[memoryview, _ChannelExchange | None]]:
        """Frames whose predecessors are done, each a header and a payload."""
        sent, arrived = exchange.sent, exchange.received.done
        found: list[tuple[memoryview, _ChannelExchange | None]] = []
        while not sent.over and sent.messages[sent.done].needs <= arrived:
            index, offset, length = sent.next()
            begin = sent.messages[index].offset + offset
            head = frames.FrameHeader(number, frames.DATA, index, length, offset).pack()
            found.append((memoryview(head), None if length else exchange))
            if length:
                source = exchange.source
                outside = source is None or begin + length > len(source)
                found.append((self._zeros[:length] if outside else source[begin : begin + length], exchange))  # type: ignore[index]
            exchange.unsent += 1
            sent.advance(length)
        return found

    def _send(self, frames: list[tuple[memoryview, _ChannelExchange | None]]) -> None:
        """Hand `frames` to the socket, and what it does not take now to the writer."""
        waiting = bool(self._queue)
        self._queue.extend(frames)
        if waiting:
            return  # the writer is at it
        try:
            while self._queue:
                some = [view for view, _ in islice(self._queue, _AT_ONCE)]
                self._taken(self._socket.sendmsg(some, [], socket.MSG_DONTWAIT))
        except BlockingIOError:
            pass
        except OSError:
            return  # the reader sees it too, and says why
        if self._queue:
            self._writable.notify()

    def _taken(self, count: int) -> None:
        """The socket has `count` bytes more."""
        while self._queue:
            view, exchange = self._queue[0]
            if count < len(view):
                self._queue[0] = (view[count:], exchange)
                return
            count -= len(view)
            self._queue.popleft()
            if exchange is not None:
                exchange.unsent -= 1
                self._settle(exchange)

    def _write(self) -> None:
        with self._lock:
            while self._error is None:
                if not self._queue:
                    self._writable.wait()
                    continue
                view, _ = self._queue[0]
                self._lock.release()
                try:
                    count = self._socket.send(view)
                except OSError:
                    return
                finally:
                    self._lock.acquire()
                if self._queue:
                    self._taken(count)

    # --- receiving: the reader's thread ---

    def _read(self) -> None:
        try:
            reason = self._frames()
        except (ConnectionResetError, EOFError):
            reason = self._closed
        except Exception as error:  # of any kind: those who wait must not wait for ever
            reason = f"messages of the environment process at {self._address}: {type(error).__name__}: {error}"
        self._fail(reason)

    def _frames(self) -> str:
        """Read until the connection ends; returns the reason."""
        view = memoryview(bytearray(frames.STAGED))
        begin = end = 0
        wanted = frames.STAGED
        while True:
            while end - begin < frames.HEADER:
                if begin:
                    view[: end - begin] = bytes(view[begin:end])
                    begin, end = 0, end - begin
                count = self._socket.recv_into(view[end:], wanted if end < wanted else frames.HEADER)
                if not count:
                    return self._closed
                end += count
            head = frames.header(view, begin)
            begin += frames.HEADER
            here = min(head.length, end - begin)
            if head.type == frames.ERROR:
                text = bytes(view[begin : begin + here])
                while len(text) < head.length and (more := self._socket.recv(head.length - len(text))):
                    text += more
                return f"the environment process reports: {text.decode('utf-8', 'replace')}"
            self._frame(head, view[begin : begin + here])
            begin += here
            # After a large frame another one comes: what is read with its header would be copied twice.
            wanted = frames.HEADER if head.length > frames.STAGED else frames.STAGED

    def _frame(self, head: frames.FrameHeader, here: memoryview) -> None:
        """One frame of a message, of which the bytes `here` are read already."""
        exchange = self._exchanges.get(head.operation)
        got = (head.message, head.offset, head.length)
        if exchange is None or exchange.received.over or got != exchange.received.next():
            known = "an unknown operation" if exchange is None else exchange.operation.title
            raise RewriterError(
                f"message {head.message} of operation {head.operation} ({known}), {head.length} bytes at "
                f"{head.offset}, is not the expected one. Both ends must run the same version"
            )
        if not exchange.filled:
            exchange.operation.fill()
            exchange.filled = True
        message = exchange.received.messages[head.message]
        place, flags = self._room, socket.MSG_WAITALL | frames.DROP
        if message.reduced:
            place, flags = self._room[head.offset :], socket.MSG_WAITALL
            place[: len(here)] = here
        count = len(here)
        while count < head.length:
            more = self._socket.recv_into(place[count:] if message.reduced else place, head.length - count, flags)
            if not more:
                raise EOFError
            count += more
        if head.due:
            exchange.due = head.due
        complete = head.offset + head.length == message.length
        if complete and message.reduced and exchange.target is not None:
            _add(exchange.target, self._segment, message.offset, message.length)
        with self._lock:
            exchange.received.advance(head.length)
            if complete:
                self._send(self._allowed(head.operation, exchange))
                self._settle(exchange)

    def _settle(self, exchange: _ChannelExchange) -> None:
        """End an operation whose messages are all through."""
        if exchange.over and self._exchanges.pop(exchange.number, None) is exchange:
            exchange.work.arrive(exchange.operation.called + exchange.due * 1e-9)

    def _fail(self, reason: str) -> None:
        with self._lock:
            if self._error is None:
                self._error = CollectiveAborted(reason)
            left, self._exchanges = list(self._exchanges.values()), {}
            self._queue.clear()
            self._writable.notify_all()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for exchange in left:
            exchange.work.finish(CollectiveAborted(f"{exchange.operation.title}: {self._error}"))


def _flat(tensors: tuple[Tensor, ...]) -> Tensor | None:
    """One contiguous tensor as a vector, of a dtype in which sums can be computed."""
    if len(tensors) != 1 or not tensors[0].is_contiguous():
        return None
    flat = tensors[0].data.view(-1) if tensors[0].dim() else tensors[0].data.view(1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    return flat.view(torch.uint8) if flat.dtype.itemsize == 1 else flat


def _bytes(flat: Tensor) -> memoryview:
    array: Any = flat.view(torch.uint8).numpy()  # numpy's stubs do not call it a buffer
    return memoryview(array)


def _add(target: Tensor, zeros: Tensor, offset: int, length: int) -> None:
    """Sum up `length` bytes at `offset` bytes of `target`, as any reduction would in its time: `zeros` is what came."""
    item = target.dtype.itemsize
    part = target[offset // item : (offset + length) // item]
    part.add_(zeros[: part.numel() * item].view(target.dtype))

"""The wire mode, in a real rank: every operation exchanges real messages with the environment process over TCP.

The rank does what gloo does in its place: it sends its segments, receives others, sums up those that a reduction
brings, two of them under way at a time (see `plan`). What the environment sends has no meaning, so the values of the
outputs are written once, by `EmulatedOperation.fill`; that takes the place of copying out of the socket what is not
summed up, which Linux then skips. So a rank's CPU is as busy as in the real job.

The environment process knows when messages may pass, but not whether this rank computes meanwhile, which keeps the real
library's threads waiting (`Delay.hindrance`): with the environment's model the rank adds that by itself.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rewriter.common.errors import RewriterError
from rewriter.emulation.cpu_progress import CpuProgress
from rewriter.emulation.exchange import ANNOUNCE, ERROR, ZEROS, Announced, Connection, Loop, MessageExchange, frame
from rewriter.emulation.operation import EmulatedOperation
from rewriter.emulation.plan import SEGMENT, PlannedMessage
from rewriter.emulation.rendezvous import Rendezvous
from rewriter.emulation.work import CollectiveAborted, EmulatedWork, Timer
from rewriter.fabric import DelayModel
from rewriter.fabric.calls import directed_delay

CONNECT_SECONDS = 60.0


class WireWork(EmulatedWork):
    """An operation whose messages have all arrived may still have to last: `arrive` gives the time."""

    def arrive(self, due: float) -> None:
        """All messages are through; it ends at `due`, seconds of `time.monotonic`, or later, or now."""
        self.due = due
        if self.deadline() <= time.monotonic():
            self.finish()
            return
        self.ready()
        if self.awaited_as_future:
            self._timer.add(self)


class RankExchange(MessageExchange):
    """The rank's part of an operation under way. `room` is where what is to be summed up arrives."""

    def __init__(self, operation: EmulatedOperation, work: WireWork, announced: Announced, room: Tensor) -> None:
        messages = announced.plan
        super().__init__(operation.title, messages.sends, messages.receives)
        self.operation, self.work = operation, work
        self._room, self._filled, self._due = room, False, 0
        # What is sent is read where it is. Several tensors, or strided ones, which gloo would copy together first:
        # the bytes of any other memory take as long.
        flat = _flat(operation.inputs)
        self._source = None if flat is None else _bytes(flat)
        self._target: Tensor | None = None
        if any(message.reduced for message in messages.receives):
            # A reduction sums up in the tensor itself; a reduce_scatter, as torch's gloo, in a copy of its input.
            self._target = flat.clone() if flat is not None and announced.kind == "reduce_scatter" else flat

    def content(self, message: PlannedMessage) -> memoryview:
        end = message.offset + message.length
        if self._source is None or end > len(self._source):
            return ZEROS[: message.length]
        return self._source[message.offset : end]

    def place(self, message: PlannedMessage) -> memoryview | None:
        if not self._filled:
            self._filled = True
            self.operation.fill()
        return _bytes(self._room)[: message.length] if message.reduced else None

    def arrived(self, message: PlannedMessage, due: int) -> None:
        self._due = due or self._due
        if self._target is not None and message.reduced:
            item = self._target.dtype.itemsize
            part = self._target[message.offset // item : (message.offset + message.length) // item]
            part.add_(self._room[: part.numel() * item].view(self._target.dtype))

    def end(self) -> None:
        self.work.arrive(self.operation.called + self._due * 1e-9)


class WireEngine(Loop):
    """Operations of this process, exchanged with the environment process at `address` ("host:port").

    `rendezvous`: where it waits for other real ones; `model`: the environment's.
    Each process group opens a connection at its first operation; one thread serves all. Tensors are on the CPU.

    Raises RewriterError for an address that is none. An operation whose environment cannot be reached, goes away, or
    reports a message that it did not expect, fails in `wait`.
    """

    def __init__(self, address: str, rendezvous: Rendezvous | None = None, model: DelayModel | None = None) -> None:
        super().__init__()
        self.address, self.endpoint = address, endpoint(address)
        self._rendezvous, self._model = rendezvous, model
        self._progress = CpuProgress()
        self._timer = Timer()
        self._begun: deque[WireWork] = deque()  # what the thread is to announce
        self._groups: dict[tuple[str, object], Connection] = {}
        self._reasons: dict[Connection, str] = {}  # of those that are over
        self._room = torch.empty(SEGMENT, dtype=torch.uint8)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def submit(self, operation: EmulatedOperation) -> Any:
        for tensor in (*operation.inputs, *operation.outputs):
            if tensor.device.type != "cpu":
                raise RewriterError(
                    f"{operation.title}: a tensor on {tensor.device}. The wire mode exchanges tensors on the CPU; use "
                    "--mode delay for devices"
                )
        work = WireWork(operation, self._progress, self._timer)
        if operation.call.size == 1:
            operation.fill()
            work.finish()
            return work
        if self._model is not None:
            delay = directed_delay(self._model, operation.call, operation.own, operation.receives)
            if delay.hindrance:
                self._progress.called()
                work.underway = self._progress.begin(operation.called, delay)
        met = partial(self._met, work)
        if self._rendezvous is None or not self._rendezvous.last(operation, operation.called, met):
            self._begin(work)
        return work

    def _met(self, work: WireWork, now: float, values: bytes | None, error: BaseException | None) -> None:
        """All real ranks have come, or never will."""
        if error is None:
            self._begin(work)
        else:
            work.finish(error)

    def _begin(self, work: WireWork) -> None:
        with self._lock:
            if self.stopped:
                work.finish(CollectiveAborted(f"{work.operation.title}: the process group was destroyed"))
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self.run, name="emulated-wire", daemon=True)
                self._thread.start()
            self._begun.append(work)
        self.wake()

    def close(self) -> None:
        """End the connections; operations under way fail."""
        with self._lock:
            self.stop()
        if self._rendezvous is not None:
            self._rendezvous.close()
        if self._thread is None:
            self.run()  # which only closes
        else:
            self._thread.join()
        for connection in self.connections:
            self._abort(connection, "the process group was destroyed meanwhile")
        for work in self._begun:
            work.finish(CollectiveAborted(f"{work.operation.title}: the process group was destroyed meanwhile"))
        self._timer.close()

    # --- in the thread ---

    def look(self) -> None:
        while self._begun:
            work = self._begun.popleft()
            try:
                self._announce(work.operation, work)
            except Exception as error:
                work.finish(error)

    def _announce(self, operation: EmulatedOperation, work: WireWork) -> None:
        call, connection = operation.call, self._connection(operation)
        if connection in self._reasons:
            raise CollectiveAborted(f"{operation.title}: {self._reasons[connection]}")
        item = max((t.element_size() for t in operation.inputs or operation.outputs), default=1)
        announced = Announced.of(call, item, operation.rank, operation.root)
        connection.exchanges.append(RankExchange(operation, work, announced, self._room))
        connection.pending.extend(frame(ANNOUNCE, announced.packed()))

    def _connection(self, operation: EmulatedOperation) -> Connection:
        call = operation.call
        key = (operation.group, call.ranks if call.kind == "send" else None)
        if key not in self._groups:
            try:
                connection = Connection(socket.create_connection(self.endpoint, timeout=CONNECT_SECONDS))
            except OSError as error:
                raise RewriterError(
                    f"environment process at {self.address}: {error}. Start it first, with "
                    "`python -m rewriter.emulation --serve HOST:PORT`, or leave --environment out"
                ) from None
            connection.heard = _heard
            self._groups[key] = connection
            self.connections.append(connection)
        return self._groups[key]

    def failed(self, connection: Connection, error: Exception) -> None:
        where = f"the environment process at {self.address}"
        if isinstance(error, OSError):
            self._abort(connection, f"{where} closed the connection. Its output, if any, says why")
        elif isinstance(error, _Reported):
            self._abort(connection, f"the environment process reports: {error}")
        else:
            self._abort(connection, f"messages of {where}: {type(error).__name__}: {error}")

    def _abort(self, connection: Connection, reason: str) -> None:
        self._reasons[connection] = reason
        for exchange in connection.exchanges:
            assert isinstance(exchange, RankExchange)
            exchange.work.finish(CollectiveAborted(f"{exchange.title}: {reason}"))


class _Reported(Exception):
    """A failure that the environment process reports."""


def _heard(type: int, body: bytes) -> None:
    if type != ERROR:
        raise RewriterError(f"a frame of type {type}, which no environment sends")
    raise _Reported(body.decode("utf-8", "replace"))


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


def endpoint(address: str) -> tuple[str, int]:
    """(host, port) of "host:port"; of "[host]:port" for IPv6. Raises RewriterError for what is none."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise RewriterError(f"environment {address!r}: expected HOST:PORT, as 10.0.0.2:29600")
    return host.removeprefix("[").removesuffix("]"), int(port)

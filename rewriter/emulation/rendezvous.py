"""Several real ranks in one job on this machine: each reports to the others when it comes to a collective, over TCP.

A collective begins when its last real member has come. The values of a broadcast or of a message travel along, where
they are few or a program's bookkeeping: integers.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor

from rewriter.common.errors import RewriterError
from rewriter.emulation.operation import EmulatedOperation
from rewriter.emulation.work import CollectiveAborted

Then = Callable[[float, bytes | None, BaseException | None], None]

_SMALL = 1 << 16  # bytes of floating-point values that are carried
_LARGE = 1 << 26  # of integers: pickled objects, counts, tokens


@dataclass
class _Meeting:
    """Ranks that have come to one operation: by rank its time, what it calls, and its values. `operation` is None
    until this rank has come."""

    came: dict[int, tuple[float, str, bytes]] = field(default_factory=dict)
    operation: EmulatedOperation | None = None
    now: float = 0.0
    then: Then | None = None


class Rendezvous:
    """The connections of real rank `own` to the other `real` ones, found through `store`.

    All real ranks make it at one point. Raises RewriterError where one does not come within `timeout` seconds.
    """

    def __init__(self, store: Any, real: tuple[int, ...], own: int, timeout: float) -> None:
        self.real, self.own = real, own
        self._lock = threading.Lock()
        self._sending = threading.Lock()  # groups may be in different threads
        self._meetings: dict[str, _Meeting] = {}
        self._gone: set[int] = set()
        self.leaves_last = False
        self._peers = _connected(store, real, own, timeout)
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, name="rewriter-rendezvous", daemon=True)
        self._thread.start()

    def last(self, operation: EmulatedOperation, now: float, then: Then) -> bool:
        """This rank came to `operation` at `now`. `then(time, values, error)` is called once, from any thread: with the
        time at which the last came, and what the root of a broadcast or the sender of a message gave. False, and it is
        not called, where no other real rank takes part."""
        members = self._others(operation)
        if not members:
            return False
        key = _key(operation)
        text = json.dumps([key, now, _what(operation)]).encode()
        values = _carried(operation)
        for rank in members:
            with contextlib.suppress(OSError), self._sending:  # who is gone is noticed by the thread
                self._peers[rank].send_bytes(text)
                self._peers[rank].send_bytes(values)
        with self._lock:
            meeting = self._meetings.setdefault(key, _Meeting())
            meeting.operation, meeting.now, meeting.then = operation, now, then
        self._settle(key)
        return True

    def _others(self, operation: EmulatedOperation) -> list[int]:
        return [rank for rank in self.real if rank != self.own and rank in operation.call.ranks]

    def _settle(self, key: str) -> None:
        """Go on with an operation to which all have come, or cannot come any longer."""
        with self._lock:
            meeting = self._meetings.get(key)
            if meeting is None or meeting.operation is None or meeting.then is None:
                return
            title, own = meeting.operation.title, _what(meeting.operation)
            missing = [rank for rank in self._others(meeting.operation) if rank not in meeting.came]
            wrong = next(((rank, what) for rank, (_, what, _) in meeting.came.items() if what != own), None)
            gone = next((rank for rank in missing if rank in self._gone), None)
            if missing and wrong is None and gone is None:
                return
            del self._meetings[key]
        error: RewriterError | None = None
        if wrong is not None:
            error = RewriterError(
                f"{title}: rank {wrong[0]} calls {wrong[1]} there. Real ranks have to call the same collectives in the "
                "same order"
            )
        elif gone is not None:
            error = CollectiveAborted(f"{title}: rank {gone} has left the job")
        values = next((values for _, _, values in meeting.came.values() if values), None)
        meeting.then(max([meeting.now, *(time for time, _, _ in meeting.came.values())]), values, error)

    def _listen(self) -> None:
        ranks: dict[Any, int] = {connection: rank for rank, connection in self._peers.items()}
        while True:
            readable: list[Any] = wait([self._woken, *ranks])
            for ready in readable:
                if ready is self._woken:
                    return
                try:
                    (key, *came), values = json.loads(ready.recv_bytes()), ready.recv_bytes()
                except (OSError, EOFError):
                    with self._lock:
                        self._gone.add(ranks.pop(ready))
                    for key in list(self._meetings):
                        self._settle(key)
                else:
                    with self._lock:
                        meeting = self._meetings.setdefault(key, _Meeting())
                        meeting.came[ranks[ready]] = (*came, values)
                    self._settle(key)

    def close(self) -> None:
        """Leave: the others' operations with this rank fail from now, or (`leaves_last`) this process's end on."""
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        if self._thread is not threading.current_thread():
            self._thread.join()
        for connection in self._peers.values() if not self.leaves_last else ():
            connection.close()
        self._wake.close()
        self._woken.close()


def _key(operation: EmulatedOperation) -> str:
    call = operation.call
    ends = f" {call.ranks[0]}>{call.ranks[1]}" if call.kind == "send" else ""
    return f"{operation.group}{ends} {operation.sequence}"


def _what(operation: EmulatedOperation) -> str:
    call = operation.call
    # splits of an all-to-all, and so its bytes, may differ between ranks
    size = "" if call.kind == "all_to_all" else f" of {call.nbytes} bytes"
    return f"{call.kind}{size} among {call.size} ranks"


def _carried(operation: EmulatedOperation) -> bytes:
    """The values that go along, on the rank that has them."""
    call, tensors = operation.call, operation.inputs
    gives = (call.kind == "broadcast" and operation.root == operation.rank) or (call.kind == "send" and bool(tensors))
    if not gives or any(x.device.type != "cpu" for x in tensors):
        return b""
    limit = _SMALL if any(x.is_floating_point() for x in tensors) else _LARGE
    if call.nbytes > limit:
        return b""
    return b"".join(x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for x in tensors)


def write(values: bytes, outputs: tuple[Tensor, ...]) -> None:
    given = torch.frombuffer(bytearray(values), dtype=torch.uint8)
    for x, part in zip(outputs, given.split([x.nbytes for x in outputs]), strict=True):
        with torch.no_grad():
            x.data.copy_(part.clone().view(x.dtype).view(x.shape))


def _connected(store: Any, real: tuple[int, ...], own: int, timeout: float) -> dict[int, Connection]:
    """A connection to each other real rank: the higher rank connects to the lower."""
    peers = {}

    def add(rank: int, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peers[rank] = Connection(connection.detach())

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(timeout)
        store.set(f"rewriter/rendezvous/{own}", str(server.getsockname()[1]))
        for rank in (r for r in real if r < own):
            connection = socket.create_connection(("127.0.0.1", int(store.get(f"rewriter/rendezvous/{rank}"))), timeout)
            connection.sendall(own.to_bytes(4, "little"))
            add(rank, connection)
        for _ in (r for r in real if r > own):
            try:
                connection, _ = server.accept()
            except TimeoutError:
                raise RewriterError(
                    f"emulated job: not all real ranks {list(real)} came within {timeout:g} s. Start each of them"
                ) from None
            add(int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "little"), connection)
    return peers

"""Several real ranks in one job on this machine: each reports to the others when it comes to a collective, over TCP.

A collective begins when its last real member has come. What one of them sends to the others that is more than time (the
values of a broadcast, of a message) travels along, where it is small or a program's own bookkeeping: integers.
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
class _Arrivals:
    operation: EmulatedOperation
    last: float
    missing: set[int]
    then: Then
    values: bytes | None = None


@dataclass
class _RealPeer:
    rank: int
    connection: Connection
    sending: threading.Lock = field(default_factory=threading.Lock)  # groups may be in different threads


class Rendezvous:
    """The connections of real rank `own` to the other `real` ones, found through `store`.

    All real ranks make it at one point. Raises RewriterError where one does not come within `timeout` seconds.
    """

    def __init__(self, store: Any, real: tuple[int, ...], own: int, timeout: float) -> None:
        self.real, self.own = real, own
        self._lock = threading.Lock()
        self._arrivals: dict[str, _Arrivals] = {}
        self._early: dict[str, list[tuple[int, dict[str, Any], bytes]]] = {}
        self._gone: dict[int, str] = {}
        self._peers = _connected(store, real, own, timeout)
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, name="rewriter-rendezvous", daemon=True)
        self._thread.start()

    def last(self, operation: EmulatedOperation, now: float, then: Then) -> bool:
        """This rank came to `operation` at `now`. `then(time, values, error)` is called once, from any thread: with the
        time at which the last came, and what the root of a broadcast or the sender of a message gave. False, and it is
        not called, where no other real rank takes part."""
        members = [rank for rank in self.real if rank != self.own and rank in operation.call.ranks]
        if not members:
            return False
        key = _key(operation)
        text = json.dumps({"key": key, "what": _what(operation), "time": now}).encode()
        values = _carried(operation)
        for rank in members:
            peer = self._peers[rank]
            with contextlib.suppress(OSError), peer.sending:  # who is gone is noticed by the thread
                peer.connection.send_bytes(text)
                peer.connection.send_bytes(values)
        with self._lock:
            self._arrivals[key] = _Arrivals(operation, now, set(members), then)
            early = self._early.pop(key, [])
        for arrival in early:
            self._came(*arrival)
        for rank in members:
            if rank in self._gone:
                self._fail(key, rank)
        return True

    def _came(self, rank: int, line: dict[str, Any], values: bytes) -> None:
        with self._lock:
            arrivals = self._arrivals.get(line["key"])
            if arrivals is None:
                self._early.setdefault(line["key"], []).append((rank, line, values))
                return
            wrong = line["what"] != _what(arrivals.operation)
            arrivals.missing.discard(rank)
            arrivals.last = max(arrivals.last, line["time"])
            arrivals.values = values or arrivals.values
            if arrivals.missing and not wrong:
                return
            del self._arrivals[line["key"]]
        error = None
        if wrong:
            error = RewriterError(
                f"{arrivals.operation.title}: rank {rank} calls {line['what']} there. Real ranks have to call the same "
                "collectives in the same order"
            )
        arrivals.then(arrivals.last, arrivals.values, error)

    def _fail(self, key: str, rank: int) -> None:
        with self._lock:
            arrivals = self._arrivals.get(key)
            if arrivals is None or rank not in arrivals.missing:
                return
            del self._arrivals[key]
        arrivals.then(0.0, None, CollectiveAborted(f"{arrivals.operation.title}: rank {rank} {self._gone[rank]}"))

    def _listen(self) -> None:
        peers: dict[Any, _RealPeer] = {peer.connection: peer for peer in self._peers.values()}
        while True:
            for ready in wait([self._woken, *peers]):
                if ready is self._woken:
                    return
                peer = peers[ready]
                try:
                    line, carried = json.loads(peer.connection.recv_bytes()), peer.connection.recv_bytes()
                except (OSError, EOFError):
                    del peers[ready]
                    self._leave(peer)
                else:
                    self._came(peer.rank, line, carried)

    def _leave(self, peer: _RealPeer) -> None:
        self._gone[peer.rank] = "has left the job"
        for key in list(self._arrivals):
            self._fail(key, peer.rank)

    def close(self) -> None:
        """Leave: the others' operations with this rank fail from now on."""
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        if self._thread is not threading.current_thread():
            self._thread.join()
        for peer in self._peers.values():
            peer.connection.close()
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


def _connected(store: Any, real: tuple[int, ...], own: int, timeout: float) -> dict[int, _RealPeer]:
    """A connection to each other real rank: the higher rank connects to the lower."""
    peers = {}

    def add(rank: int, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peers[rank] = _RealPeer(rank, Connection(connection.detach()))

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

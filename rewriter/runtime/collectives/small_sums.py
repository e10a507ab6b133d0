"""All-reduces and gathers of small CPU tensors through a socket between any two ranks, faster than gloo's.

Gloo has threads that pass a message on. Of a decode step's few kilobytes most of the time goes to waking them, and
where a rank computes on all cores they wait for one (`benchmarks/collectives/small_sums.py`). Here a start hands the
tensor to the kernel, once per peer, and a wait takes what all have sent and adds it in the order of ranks, so that all
get the same bits. In between the kernel sends and receives by itself: what is under way needs no thread. Small tensors
of many ranks go this way, and of two ranks all that the kernel's buffers hold: a ring sends as much in two rounds.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rewriter.kernels import sum_into
from rewriter.runtime.collectives.process_groups import of_all

LARGEST = 256 * 1024  # bytes that a rank sends: (P - 1) n of a tensor of n bytes, where a ring sends 2 n (P - 1) / P
_PAIR_BUFFER = 4 << 20  # bytes of a socket of two ranks, each way, for which a ring saves nothing
_BUFFER = 1 << 20  # of more ranks; of both the kernel may allow fewer (net.core.wmem_max and rmem_max)
_UNDER_WAY = 2  # sums at once for which a buffer has room: of two blocks of a ladder
_PATIENCE = 600.0  # seconds for a peer
_CONNECT = 10.0  # seconds for a connection
_BACKLOG = 128  # ranks that wait to be accepted
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux


def connect_small_sums(group: ProcessGroup | None, device: torch.device) -> bool:
    """Connect all ranks of `group`, which call this together: from then on its small sums on a CPU go through sockets.

    False on all ranks where they take the backend's: on other devices, and where two of them have no connection.
    """
    if group is None or group.size() == 1 or device.type != "cpu" or (sums := _connect(group)) is None:
        return False
    _of_group[group] = sums
    return True


def small_sums_take(x: Tensor, group: ProcessGroup) -> bool:
    """True where sums and gathers of `x` over `group` go through sockets."""
    sums = _of_group.get(group)
    return sums is not None and sums.takes(x)


def small_sum_start(x: Tensor, group: ProcessGroup) -> SocketSum | None:
    """Begin the sum of the contiguous `x`, in place; the result has a `wait` like torch's Work. None where the backend
    sums it: large tensors, and those with gradients, whose rules are about tensors that torch sums in place."""
    sums = _of_group.get(group)
    if sums is None or torch.is_grad_enabled() or not sums.takes(x):
        return None
    return sums.start(x)


def small_gather(x: Tensor, group: ProcessGroup) -> list[Tensor] | None:
    """The contiguous `x` of every rank, in their order; None where the backend gathers it."""
    sums = _of_group.get(group)
    return None if sums is None or not sums.takes(x) else sums.gather(x)


def _connect(group: ProcessGroup) -> Any:
    """Something with the methods of SocketSums, or None."""
    if (own := getattr(group, "small_sums", None)) is not None:  # of a group whose peers are emulated
        return own()
    return socket_sums(group.rank(), partial(of_all, group)) if dist.get_backend(group) == "gloo" else None


def socket_sums(rank: int, of_all: Callable[[Any], list[Any]]) -> SocketSums | None:
    """Connect the ranks of a group, which call this together; None on all of them where two have no connection.
    `of_all(own)`: what every rank gives, in their order."""
    listener, connections = None, {}
    with suppress(OSError):
        listener = socket.create_server((_own_address(), 0), backlog=_BACKLOG)
    address = ("", 0) if listener is None else listener.getsockname()
    told = of_all((address, socket.gethostname(), secrets.token_bytes(16)))
    addresses, hosts = [address for address, _, _ in told], {host for _, host, _ in told}
    # a host's name may stand for its loopback, which is another one on every host
    possible = all(ip and not (ip.startswith("127.") and len(hosts) > 1) for ip, _ in addresses)
    if listener is not None:
        with listener, suppress(OSError):
            connections = _connected(listener, addresses, rank, told[0][2]) if possible else {}
    connected = len(connections) == len(told) - 1
    room = min(of_all(min(map(_room, connections.values())) if connected else 0))
    if room:
        return SocketSums(connections, rank, room // _UNDER_WAY)
    for connection in connections.values():
        connection.close()
    return None


@dataclass
class _Peer:
    """Another rank: what is still to go there and room for what is still to come, in the order of the sums, and how
    many of each are through."""

    connection: socket.socket
    out: deque[memoryview] = field(default_factory=deque)
    room: deque[memoryview] = field(default_factory=deque)
    sent: int = 0
    received: int = 0

    def move(self) -> None:
        """Send what the kernel takes and receive what it has. Raises OSError where the other rank has ended."""
        try:
            while self.out:
                self.out[0] = self.out[0][self.connection.send(self.out[0]) :]
                if not self.out[0]:
                    self.out.popleft()
                    self.sent += 1
        except BlockingIOError:
            pass
        try:
            while self.room:
                count = self.connection.recv_into(self.room[0])
                if not count:
                    raise ConnectionResetError("it has closed the connection")
                self.room[0] = self.room[0][count:]
                if not self.room[0]:
                    self.room.popleft()
                    self.received += 1
        except BlockingIOError:
            pass


class SocketSums:
    """The other ranks of a group, in their order, each behind a connection. `largest` is how many bytes of a tensor the
    kernel holds on their way."""

    def __init__(self, connections: dict[int, socket.socket], rank: int, largest: int) -> None:
        self.rank, self.number = rank, 0
        self.largest = largest if len(connections) == 1 else min(largest, LARGEST // len(connections))
        self.peers = {other: _Peer(connections[other]) for other in sorted(connections)}
        for peer in self.peers.values():
            peer.connection.setblocking(False)

    def takes(self, x: Tensor) -> bool:
        return 0 < x.nbytes <= self.largest and x.device.type == "cpu"

    def start(self, x: Tensor) -> SocketSum:
        return SocketSum(self, x, self._exchange(x), self.number)

    def gather(self, x: Tensor) -> list[Tensor]:
        return self.start(x).received()

    def _exchange(self, x: Tensor) -> list[Tensor]:
        """Begin to send `x` to all: room for every rank's, this rank's `x` itself."""
        self.number += 1
        parts = [x if rank == self.rank else torch.empty_like(x) for rank in range(len(self.peers) + 1)]
        for rank, peer in self.peers.items():
            peer.out.append(_bytes(x))
            peer.room.append(_bytes(parts[rank]))
        self._move()
        return parts

    def until(self, number: int) -> None:
        """Wait until the sum `number` is with all peers and theirs are here. Raises TimeoutError and ConnectionError,
        which name the rank."""
        begin = time.monotonic()
        self._move()
        while late := {n: p for n, p in self.peers.items() if min(p.sent, p.received) < number}:
            poll = select.poll()  # unlike select, for any number of open files
            for peer in late.values():
                poll.register(peer.connection, select.POLLIN | (select.POLLOUT if peer.out else 0))
            poll.poll(1000)
            self._move()
            if time.monotonic() - begin > _PATIENCE:
                raise TimeoutError(f"all-reduce through sockets: rank {min(late)} did not come in {_PATIENCE:g} s")

    def _move(self) -> None:
        for other, peer in self.peers.items():
            try:
                peer.move()
            except OSError as error:
                raise ConnectionError(f"all-reduce through sockets: rank {other} has ended: {error}") from None


@dataclass(eq=False)
class SocketSum:
    """A sum between its start and its wait."""

    sums: SocketSums
    x: Tensor
    parts: list[Tensor]
    number: int

    def wait(self) -> bool:
        sum_into(self.x, self.received())
        return True

    def received(self) -> list[Tensor]:
        """Waits for every rank's tensor: them, in the order of ranks."""
        self.sums.until(self.number)
        parts, self.parts = self.parts, []
        return parts


_of_group: weakref.WeakKeyDictionary[ProcessGroup, Any] = weakref.WeakKeyDictionary()


def _bytes(x: Tensor) -> memoryview:
    values: Any = x.reshape(-1).view(torch.uint8).numpy()
    return memoryview(values)


def _room(connection: socket.socket) -> int:
    """Bytes of a message that the kernel holds on its way. Linux tells twice of that, half for its own use."""
    return min(connection.getsockopt(socket.SOL_SOCKET, buffer) // 2 for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF))


def _own_address() -> str:
    """Address of the interface that gloo is told to use, else of this host's name. Raises OSError without one."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if not interface:
        return socket.gethostbyname(socket.gethostname())
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _GET_ADDRESS, struct.pack("256s", interface.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])


def _connected(
    listener: socket.socket, addresses: list[tuple[str, int]], rank: int, word: bytes
) -> dict[int, socket.socket]:
    """Connections to all other ranks: this one calls those before it and is called by those after it, who say the
    `word` of this job and their number. Raises OSError."""
    made = {}
    listener.settimeout(_CONNECT)
    try:
        for other in range(rank):
            made[other] = socket.create_connection(addresses[other], timeout=_CONNECT)
            made[other].sendall(word + struct.pack("!I", rank))
        while len(made) < len(addresses) - 1:
            connection, _ = listener.accept()
            connection.settimeout(_CONNECT)
            said = connection.recv(len(word) + 4, socket.MSG_WAITALL)
            if said[: len(word)] == word:
                made[struct.unpack("!I", said[len(word) :])[0]] = connection
            else:
                connection.close()
        for connection in made.values():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                size = _PAIR_BUFFER if len(addresses) == 2 else _BUFFER
                connection.setsockopt(socket.SOL_SOCKET, buffer, size)
    except BaseException:
        for connection in made.values():
            connection.close()
        raise
    return made

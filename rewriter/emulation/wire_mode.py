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
from collections.abc import Sequence
from typing import Any

from rewriter.common.errors import RewriterError
from rewriter.emulation.channel import EnvironmentChannel, WireWork
from rewriter.emulation.cpu_progress import CpuProgress
from rewriter.emulation.frames import Hello
from rewriter.emulation.operation import EmulatedOperation
from rewriter.emulation.work import Timer
from rewriter.fabric import DelayModel
from rewriter.fabric.rank_groups import directed_delay

CONNECT_SECONDS = 60.0  # an environment process that starts at the same time may be as late as this


class WireEngine:
    """Operations of this process, exchanged with the environment process at `address` ("host:port").

    `rank`: this process's global rank; `real`: all that are real; `model`: the environment's. Each process group opens
    a connection at its first operation. Tensors are on the CPU. Raises RewriterError where the environment cannot be
    reached; an operation whose environment goes away, or reports a message that it did not expect, fails in `wait` with
    CollectiveAborted.
    """

    def __init__(self, address: str, rank: int, real: Sequence[int] = (), model: DelayModel | None = None) -> None:
        self.address, self.rank, self.real = address, rank, tuple(real) or (rank,)
        self.endpoint = endpoint(address)
        self._model = model
        self._progress = CpuProgress()
        self._channels: dict[tuple[str, object], EnvironmentChannel] = {}
        self._lock = threading.Lock()
        self._timer = Timer()
        self._closed = False

    def submit(self, operation: EmulatedOperation) -> Any:
        for tensor in (*operation.inputs, *operation.outputs):
            if tensor.device.type != "cpu":
                raise RewriterError(
                    f"{operation.title}: a tensor on {tensor.device}. The wire mode exchanges tensors on the CPU; use "
                    "--mode delay for devices"
                )
        work = WireWork(operation, self._progress, self._timer)
        call = operation.call
        if call.size == 1:
            operation.fill()
            work.finish()
            return work
        if self._model is not None:
            delay = directed_delay(self._model, call, operation.own, operation.receives)
            if delay.hindrance:
                self._progress.called()
                work.underway = self._progress.begin(operation.called, delay)
        self._channel(operation).begin(operation, work)
        return work

    def close(self) -> None:
        with self._lock:
            self._closed = True
            channels = list(self._channels.values())
        for channel in channels:
            channel.close()
        self._timer.close()

    def _channel(self, operation: EmulatedOperation) -> EnvironmentChannel:
        call = operation.call
        key = (operation.group, call.ranks if call.kind == "send" else None)
        channel = self._channels.get(key)
        if channel is not None:
            return channel
        with self._lock:
            if self._closed:
                raise RewriterError(f"{operation.title}: the emulated job has ended: its process group was destroyed")
            if key not in self._channels:
                hello = Hello.of(self.rank, operation.group, call.ranks, self.real)
                self._channels[key] = EnvironmentChannel(self._connect(), hello, self.address)
            return self._channels[key]

    def _connect(self) -> socket.socket:
        limit = time.monotonic() + CONNECT_SECONDS
        while True:
            try:
                connected = socket.create_connection(self.endpoint, timeout=CONNECT_SECONDS)
                break
            except OSError as error:
                if time.monotonic() > limit or not isinstance(error, ConnectionRefusedError):
                    raise RewriterError(
                        f"environment process at {self.address}: {error}. Start it with "
                        "`python -m rewriter.emulation --serve HOST:PORT`, or leave --environment out"
                    ) from None
                time.sleep(0.05)
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connected


def endpoint(address: str) -> tuple[str, int]:
    """(host, port) of "host:port"; of "[host]:port" for IPv6. Raises RewriterError for what is none."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise RewriterError(f"environment {address!r}: expected HOST:PORT, as 10.0.0.2:29600")
    return host.removeprefix("[").removesuffix("]"), int(port)

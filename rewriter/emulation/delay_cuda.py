"""Operations that take as long as a model of delays says, on a CUDA device: as kernels on the stream that NCCL's would
be on. The CPU never waits for them, and all of it can be captured in a CUDA graph.

Streams are ProcessGroupNCCL's since torch 2.8: a synchronous operation is on the current stream; an asynchronous one on
a stream of its group, after what the current stream had to do, and `wait` makes the then current stream wait. Tensors
are held by the Work until then, and not recorded on streams.

Delays are in a table on the device. A captured graph reads it when it is replayed: `CudaDelayEngine.change` gives all
collectives that were ever called other delays, and so the same graph another fabric.
"""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from rewriter.common.errors import RewriterError
from rewriter.emulation.operation import EmulatedOperation
from rewriter.emulation.work import CollectiveTimeout, OperationWork
from rewriter.fabric import Call, Delay, DelayModel
from rewriter.fabric.calls import directed_delay

_ROWS = 1 << 14  # different calls
_EAGER = 1 << 12  # launches under way at a time, outside of graphs
_CAPTURED = 1 << 16  # launches in graphs
_LINKS = 1 << 12
_SCRATCH = 1 << 27  # bytes read, and as many written: more than caches hold
_FUSED = 1 << 18  # bytes for each block up to which the kernel writes sums itself
_MEASURED, _ROUNDS = 50, 5  # launches, to measure how much longer than its delay one takes, and how often
_ASKED, _BUSY = 50e-6, 2e-3  # seconds of each of them, and of the one before them
_SUMMED = (torch.float32, torch.bfloat16, torch.float16)


class CudaDelayEngine:
    """Engine of one device. `launch_nanoseconds`: excess of a launch over its delay, subtracted from delays; it is
    measured when the engine is made, which waits for the device a few times.

    Raises RewriterError where it is first needed while a CUDA graph is captured.
    """

    def __init__(self, model: DelayModel, device: torch.device) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RewriterError(
                "emulated backend: its first collective is in a CUDA graph that is captured. Run what is captured once "
                "eagerly first"
            )
        from rewriter.kernels import hold_triton

        self._kernels = hold_triton
        self.model, self.device = model, device
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._rows: dict[tuple[Call, int, bool], int] = {}
        self._blocks: dict[int, int] = {}
        self._link_numbers: dict[str, int] = {}
        self._launched = self._captured = 0
        self._held: dict[torch.cuda.Event, EmulatedOperation] = {}  # asynchronous ones until `wait`, oldest first
        with torch.cuda.device(device):
            self._table = torch.zeros(_ROWS, hold_triton.ROW, dtype=torch.int64, device=device)
            self._free = torch.zeros(_LINKS, dtype=torch.int64, device=device)
            self._lock = torch.zeros(1, dtype=torch.int64, device=device)
            self._state = torch.zeros(_EAGER + _CAPTURED, hold_triton.STATE, dtype=torch.int64, device=device)
            self._scratch = torch.zeros(2 * _SCRATCH // 4, dtype=torch.int32, device=device)
            self._nothing = torch.zeros(1, device=device)
            self.launch_nanoseconds = self._measured()

    def submit(self, operation: EmulatedOperation) -> CudaWork:
        """Begin `operation`. Raises RewriterError where a graph is captured that has collectives which were not called
        before: their delays cannot be put into the table then."""
        with torch.cuda.device(self.device):
            row = self._row(operation)
            current = torch.cuda.current_stream()
            stream = current
            if operation.asynchronous:
                if operation.group not in self._streams:
                    self._streams[operation.group] = torch.cuda.Stream(priority=-1)  # as NCCL's is where `load` joins
                stream = self._streams[operation.group]
                stream.wait_stream(current)
            with torch.cuda.stream(stream) if stream is not current else nullcontext():
                self._enqueue(operation, row)
                if stream is current:
                    return CudaWork(operation, self._held, self.device)
                done = torch.cuda.Event()
                done.record()
                if not torch.cuda.is_current_stream_capturing():
                    # a program may forget its Work: what it wrote to could be used again before it is through
                    while self._held and (oldest := next(iter(self._held))).query():
                        del self._held[oldest]
                    self._held[done] = operation
                return CudaWork(operation, self._held, self.device, done)

    def change(self, model: DelayModel) -> None:
        """From now on, and in graphs that were captured, collectives take what `model` says."""
        self.model = model
        for what, row in self._rows.items():
            self._write(row, directed_delay(model, *what))

    def close(self) -> None:
        self._held.clear()

    # --- the table ---

    def _row(self, operation: EmulatedOperation) -> int:
        call = operation.call
        key = call, operation.own, operation.receives
        if key in self._rows:
            return self._rows[key]
        if torch.cuda.is_current_stream_capturing():
            raise RewriterError(
                f"{operation.title}: a CUDA graph is captured, but it was not called before. Run what is captured once "
                "eagerly first"
            )
        if len(self._rows) == _ROWS:
            raise RewriterError(f"{operation.title}: more than {_ROWS} different calls of collectives in one job")
        delay = directed_delay(self.model, *key)
        row = self._rows[key] = len(self._rows)
        self._write(row, delay)
        return row

    def _write(self, row: int, delay: Delay) -> None:
        if len(delay.links) > self._kernels.LINKS:
            raise RewriterError(f"a collective on {len(delay.links)} links, expected at most {self._kernels.LINKS}")
        if delay.seconds * 1e9 > self._kernels.LONGEST.value:
            longest = self._kernels.LONGEST.value / 1e9
            raise RewriterError(f"a collective of {delay.seconds:g} s, expected at most {longest:g} s on a GPU")
        numbers = [self._link_numbers.setdefault(link, len(self._link_numbers)) for link in delay.links]
        numbers += [-1] * (self._kernels.LINKS - len(numbers))
        nanoseconds = max(0, round(delay.seconds * 1e9) - self.launch_nanoseconds)
        values = [nanoseconds, min(nanoseconds, round(delay.transfer * 1e9)), delay.memory_bytes, *numbers]
        values += [0] * (self._kernels.ROW - len(values))
        self._blocks[row] = max(1, delay.blocks)
        self._table[row].copy_(torch.tensor(values, dtype=torch.int64))

    # --- the kernels ---

    def _enqueue(self, operation: EmulatedOperation, row: int) -> None:
        factor = _fused(operation, self._blocks[row])
        if factor is None and operation.outputs and not operation.receives:
            state = self._slot()
            self._kernels.arrive_kernel[(1,)](
                self._table[row], self._free, self._lock, state, self._kernels.LINKS, num_warps=1
            )
            operation.fill()
            self._hold(row, state, alone=False)
        else:
            self._hold(row, self._slot(), alone=True, x=operation.outputs[0].data if factor else None, factor=factor)

    def _hold(self, row: int, state: Tensor, alone: bool, x: Tensor | None = None, factor: float | None = None) -> None:
        self._kernels.hold_kernel[(self._blocks.get(row, 1),)](
            self._table[row],
            self._free,
            self._lock,
            state,
            self._nothing if x is None else x,
            factor or 1.0,
            0 if x is None else x.numel(),
            self._scratch,
            _SCRATCH // 4,
            ALONE=alone,
            LINKS=self._kernels.LINKS,
            TILE=self._kernels.TILE,
            num_warps=self._kernels.WARPS,
            num_stages=1,
        )

    def _slot(self) -> Tensor:
        """The state of a launch. Those in graphs are kept: they are launched again."""
        if torch.cuda.is_current_stream_capturing():
            if self._captured == _CAPTURED:
                raise RewriterError(f"CUDA graphs with more than {_CAPTURED} emulated collectives in one job")
            self._captured += 1
            return self._state[_EAGER + self._captured - 1]
        self._launched += 1
        return self._state[self._launched % _EAGER]

    def _measured(self) -> int:
        """Nanoseconds by which a launch outlasts its delay, where one follows the other in a graph.

        In front is a launch that keeps the device until the whole graph is in its queue: the time that the host needs
        to replay one does not count.
        """
        self.launch_nanoseconds = 0
        for row, seconds in enumerate((_ASKED, _BUSY)):
            self._write(row, Delay(seconds, seconds, ()))
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        excesses = []
        with torch.cuda.stream(stream):
            self._hold(0, self._state[0], alone=True)  # compiles
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(_MEASURED):
                    self._hold(0, self._state[0], alone=True)
            for _ in range(_ROUNDS):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self._hold(1, self._state[0], alone=True)
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                excesses.append(begin.elapsed_time(end) * 1e6 / _MEASURED)
        return max(0, round(statistics.median(excesses) - _ASKED * 1e9))


def _fused(operation: EmulatedOperation, blocks: int) -> float | None:
    """The factor by which the kernel itself multiplies the tensor, where that is all that is to be written."""
    if operation.call.kind != "all_reduce" or len(operation.outputs) != 1 or operation.reduction != "sum":
        return None
    (x,) = operation.outputs
    if x.dtype not in _SUMMED or not x.is_contiguous() or x.nbytes > blocks * _FUSED:
        return None
    return float(operation.call.size)


class CudaWork(OperationWork):
    """An operation on a stream: `wait` makes the current stream wait. Only that of a barrier waits itself. What was
    begun in a CUDA graph that is captured is waited for there, as the capture's end demands."""

    def __init__(
        self,
        operation: EmulatedOperation,
        held: dict[torch.cuda.Event, EmulatedOperation],
        device: torch.device,
        done: torch.cuda.Event | None = None,
    ) -> None:
        super().__init__(operation)
        self._held, self._device, self._done = held, device, done
        self._received = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """True. Raises CollectiveTimeout from a barrier that takes longer than its timeout."""
        with torch.cuda.device(self._device):
            capturing = torch.cuda.is_current_stream_capturing()
            if self._done is not None:
                torch.cuda.current_stream().wait_event(self._done)
                self._held.pop(self._done, None)
            self._receive()
            if self.operation.call.kind == "barrier" and not capturing:
                given = timeout is not None and timeout > timedelta(0)
                self._host(timeout.total_seconds() if given and timeout else self.operation.timeout)
        return True

    def _receive(self) -> None:
        """Write what a message brings, which is known when it is waited for: sends may have been called after it."""
        if self.operation.receives and not self._received:
            self._received = True
            self.operation.fill()

    def _host(self, seconds: float) -> None:
        reached = torch.cuda.Event()
        reached.record()
        limit = time.monotonic() + seconds
        while not reached.query():
            if time.monotonic() > limit:
                raise CollectiveTimeout(f"{self.operation.title}: not done within {seconds:g} s")
            time.sleep(0)

    def is_completed(self) -> bool:
        return self._done is None or self._done.query()

    is_success = is_completed

    def exception(self) -> None:
        return None

    def get_future(self) -> Any:
        """Done at once, for streams: who asks for its value makes its own stream wait."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=[self._device])
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()
            if self._done is None:
                stream.wait_stream(torch.cuda.current_stream())
            else:
                stream.wait_event(self._done)
            with torch.cuda.stream(stream):
                self._receive()
                future.set_result(list(self.operation.outputs))
        return future

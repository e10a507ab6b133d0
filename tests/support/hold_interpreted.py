"""The kernels of emulated collectives in Triton's interpreter, with a clock that this script moves: prints JSON."""

from __future__ import annotations

import contextlib
import json
from unittest import mock

import torch
import triton.language as tl

from rewriter.common.errors import RewriterError
from rewriter.emulation import delay_cuda
from rewriter.emulation.operation import EmulatedOperation
from rewriter.emulation.values import Mailbox
from rewriter.fabric import Call, Delay, load_fabric
from rewriter.kernels import hold_triton
from rewriter.kernels.hold_triton import LINKS, ROW, STATE, TILE, arrive_kernel, hold_kernel

STEP = 100  # nanoseconds between two looks at the clock
_time = [0]


def clock():
    _time[0] += STEP
    return tl.full((), _time[0], tl.int64)


hold_triton.clock = clock


class Device:
    """Tables, and collectives that follow each other."""

    def __init__(self) -> None:
        self.free = torch.zeros(4, dtype=torch.int64)
        self.lock = torch.zeros(1, dtype=torch.int64)
        self.state = torch.zeros(STATE, dtype=torch.int64)
        self.scratch = torch.arange(2 * 4 * TILE, dtype=torch.int32)

    def hold(self, delay, transfer, links, blocks=1, moved=0, x=None, factor=1.0, alone=True):
        """(begin, end) on the clock."""
        row = torch.tensor([delay, transfer, moved, *links, *[-1] * (LINKS - len(links)), 0])
        assert len(row) == ROW
        x = torch.zeros(1) if x is None else x
        begun = _time[0]
        if not alone:
            arrive_kernel[(1,)](row, self.free, self.lock, self.state, LINKS)
        hold_kernel[(blocks,)](
            *(row, self.free, self.lock, self.state, x, factor, x.numel(), self.scratch, 4 * TILE),
            ALONE=alone,
            LINKS=LINKS,
            TILE=TILE,
        )
        return begun, _time[0]


class Stream:
    def __init__(self, priority: int = 0) -> None:
        self.log: list[str] = []

    def wait_stream(self, other) -> None:
        self.log.append("waited for a stream")

    def wait_event(self, event) -> None:
        self.log.append("waited for its event")

    def synchronize(self) -> None: ...


class Event:
    def __init__(self, **options) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other) -> float:
        return 0.0


class Constant:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def delay(self, call: Call) -> Delay:
        return Delay(self.seconds, 0.0, ("nic",))


def engine():
    """CudaDelayEngine on the CPU."""
    capturing, current = [False], Stream()
    nothing = contextlib.nullcontext
    fakes = {
        "device": nothing,
        "stream": nothing,
        "current_stream": lambda: current,
        "Stream": Stream,
        "Event": Event,
        "is_current_stream_capturing": lambda: capturing[0],
        "CUDAGraph": mock.MagicMock,
        "graph": lambda *_, **__: nothing(),
    }
    found = {"values": {}, "seconds": {}}
    with contextlib.ExitStack() as patches:
        for name, fake in fakes.items():
            patches.enter_context(mock.patch.object(torch.cuda, name, fake))
        smaller = {"_SCRATCH": 4 * 4 * TILE, "_MEASURED": 3, "_ROUNDS": 2, "_ASKED": 5e-6, "_BUSY": 2e-5}
        patches.enter_context(mock.patch.multiple(delay_cuda, **smaller))
        made = delay_cuda.CudaDelayEngine(Constant(20e-6), torch.device("cpu"))
        mailbox = Mailbox()

        def run(name, kind, inputs, outputs, **options):
            ranks = (1, 0) if kind == "send" else range(8)
            call = Call(kind, sum(x.nbytes for x in outputs or inputs), ranks)
            own = int(kind == "send" and bool(outputs))
            operation = EmulatedOperation(call, "world", 1, own, tuple(inputs), tuple(outputs), 9.0, **options)
            begun = _time[0]
            work = made.submit(operation)
            if name:
                found["seconds"][name] = (_time[0] - begun) / 1e9
                work.wait()
                found["values"][name] = outputs[0].tolist()
            return work

        x = torch.ones(5)
        run("all_reduce", "all_reduce", [x], [x])
        y = torch.ones(5)
        run("maximum", "all_reduce", [y], [y], reduction="max")
        run("all_gather", "all_gather", [torch.ones(1)], [torch.empty(8)])
        z = torch.empty(5)
        mailbox.send(y)
        run("message", "send", [], [z], mailbox=mailbox)
        work = run("", "all_reduce", [x], [x], asynchronous=True)
        work.wait()
        found["asynchronous"] = current.log[-1]
        run("", "barrier", [], [], asynchronous=True).wait()
        found["rows"] = len(made._rows)
        made.change(Constant(40e-6))
        begun = _time[0]
        run("", "all_reduce", [x], [x])
        found["changed"] = (_time[0] - begun) / 1e9
        capturing[0] = True
        run("", "all_reduce", [x], [x])
        try:
            run("", "broadcast", [x], [x], root=0)
        except RewriterError as error:
            found["captured"] = str(error)
        capturing[0] = False
        made.change(load_fabric("h100-2x8-ib").delay_model())
        made._row(EmulatedOperation(Call("all_reduce", 20, range(16)), "world", 1, 0, (x,), (x,), 9.0))
        rows = made._table[: len(made._rows)].tolist()
        found["links"] = [sum(link >= 0 for link in row[3 : 3 + LINKS]) for row in rows]
        try:
            made.change(Constant(21.0))
        except RewriterError as error:
            found["too long"] = str(error)
        made.close()
        found["held"] = len(made._held)
    return found


def limits():
    """Nanoseconds that collectives take whose tables would have them wait for ever."""
    found = {}
    limits = {"SPINS": tl.constexpr(50), "LONGEST": tl.constexpr(30_000)}
    with mock.patch.multiple(hold_triton, **limits):
        for name in ("lock", "first", "delay"):
            device = Device()
            if name == "lock":
                device.lock[0] = 1  # nobody gives it back
            elif name == "first":
                device.state[hold_triton.CAME.value] = 1  # and is gone
            begun, end = device.hold(1 << 60 if name == "delay" else 1_000, 0, [0])
            found[name] = end - begun
    return found


def main() -> None:
    found = {}
    device = Device()
    begun, end = device.hold(10_000, 6_000, [0])
    found["duration"] = end - begun
    found["free"] = device.free.tolist()
    found["state after"] = device.state.tolist()
    _time[0] = 3_000  # before the link is free again, as another stream's collective is
    free = int(device.free[0])
    _, end = device.hold(10_000, 6_000, [0, 2])
    found["queued"] = end - free
    found["both links"] = [int(device.free[i]) - free for i in (0, 2)]
    _time[0] = begun = 200_000
    _, end = device.hold(10_000, 6_000, [1], alone=False)
    found["after its arrival"] = end - begun
    x = torch.arange(2.0 * TILE + 5)
    expected = x * 3
    device.hold(1_000, 0, [], blocks=3, x=x, factor=3.0)
    found["scaled"] = bool(torch.equal(x, expected))
    half = torch.full((4,), 6e4, dtype=torch.float16)
    device.hold(1_000, 0, [], x=half, factor=8.0)
    found["finite"] = half.tolist()
    device = Device()
    before = device.scratch.clone()
    device.hold(100_000, 0, [], moved=2 * 8 * TILE)
    changed = (device.scratch != before).nonzero()
    found["words written"] = len(changed)
    found["only after"] = bool((changed >= 4 * TILE).all())
    found["limits"] = limits()
    found["engine"] = engine()
    print(json.dumps(found))


main()

"""The runtime's own sums and gathers of small tensors where a rank's peers are emulated.

They take tens of microseconds between CPU ranks (`runtime.collectives.small_sums`), less than a collective of
`torch.distributed` takes in Python. So they do not pass by the process group: `EmulatedGroup.small_sums` gives them to
the runtime where the fabric has measured them.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from rewriter.fabric import SOCKETS, Call, Delay, DelayModel
from rewriter.fabric.calls import Kind
from rewriter.kernels import sum_into
from rewriter.runtime.collectives.small_sums import SocketSum, SocketSums

_TIME = struct.Struct("d")  # seconds of time.monotonic


@dataclass
class EmulatedSums:
    """Stands for `SocketSums` of a group of `ranks`: all hold what this one holds. `model`: says how long they take."""

    ranks: tuple[int, ...] | range
    model: Callable[[], DelayModel]
    known: dict[tuple[DelayModel, Kind, int], Delay] = field(default_factory=dict)
    brief: ClassVar[float] = 1e-3  # seconds; what takes longer goes through the group, where transfers wait for others

    def takes(self, x: Tensor) -> bool:
        if not x.nbytes or x.device.type != "cpu":
            return False
        delay = self._delay("all_reduce", x.nbytes)
        return delay.library == SOCKETS and delay.seconds < self.brief

    def start(self, x: Tensor) -> Any:
        """A sum under way. Sums at once, and takes the core for as long as sending and receiving do."""
        delay, begin = self._delay("all_reduce", x.nbytes), time.monotonic()
        sum_into(x, [x] * len(self.ranks))
        while time.monotonic() - begin < delay.cpu_seconds:
            pass
        return EmulatedSum(begin + delay.seconds)

    def gather(self, x: Tensor) -> list[Tensor]:
        _until(time.monotonic() + self._delay("all_gather", x.nbytes * len(self.ranks)).seconds)
        return [x] * len(self.ranks)

    def _delay(self, kind: Kind, nbytes: int) -> Delay:
        key = (model := self.model(), kind, nbytes)
        if key not in self.known:
            self.known[key] = model.delay(Call(kind, nbytes, self.ranks, "float32"))
        return self.known[key]


@dataclass(frozen=True)
class EmulatedSum:
    """A sum between its start and its wait, which is over at `end`, seconds of `time.monotonic`."""

    end: float

    def wait(self) -> bool:
        _until(self.end)
        return True


@dataclass
class MeetingSums(EmulatedSums):
    """Of ranks that are all real: each waits for what the others send, the last to come for nobody. They tell each
    other when they came by messages of `met` that are as long as those of the sum, and take the core for as long."""

    met: SocketSums = field(kw_only=True)
    brief: ClassVar[float] = 5e-3  # where ranks share cores, the group's thread takes longer to be woken than they do

    def start(self, x: Tensor) -> MeetingSum:
        return self._come(x, self._delay("all_reduce", x.nbytes).seconds)

    def gather(self, x: Tensor) -> list[Tensor]:
        self._come(x, self._delay("all_gather", x.nbytes * len(self.ranks)).seconds).meet()
        return [x] * len(self.ranks)

    def _come(self, x: Tensor, seconds: float) -> MeetingSum:
        message = torch.empty(_TIME.size + x.nbytes, dtype=torch.uint8)
        _TIME.pack_into(_memory(message), 0, time.monotonic())
        message[_TIME.size :] = x.reshape(-1).view(torch.uint8)
        return MeetingSum(self.met.start(message), x, seconds)


@dataclass(frozen=True)
class MeetingSum:
    """A sum that is over `seconds` after the last of the other ranks came, which the first bytes of its messages say.
    Its values are those of equal ranks."""

    meeting: SocketSum
    x: Tensor
    seconds: float

    def wait(self) -> bool:
        sum_into(self.x, [self.x] * len(self.meet()))
        return True

    def meet(self) -> list[Tensor]:
        """The messages of all ranks, when the sum is over."""
        parts = self.meeting.received()
        others = (part for rank, part in enumerate(parts) if rank != self.meeting.sums.rank)
        came = max(_TIME.unpack_from(_memory(part))[0] for part in others)
        if (left := came + self.seconds - time.monotonic()) > 0:
            time.sleep(left)  # to the end: another rank may need the core
        return parts


def _memory(x: Tensor) -> Any:
    return x.numpy()


def _until(end: float) -> None:
    """Give the core away while there is time to be woken."""
    while (left := end - time.monotonic()) > 0:
        if left > 2e-4:
            time.sleep(left - 2e-4)

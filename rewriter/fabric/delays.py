"""What a collective takes, and what shares of a machine it holds meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from rewriter.fabric.calls import Call


@dataclass(frozen=True)
class Delay:
    """How long one collective takes and what it occupies.

    `seconds`: from the last rank's arrival to completion, with nothing else on the link; measured ones hold what ranks
    wait for each other on average (nccl-tests, `rewrite fabrics calibrate`). `transfer`: the part of it during which it
    has the links in `links` for itself; other groups' transfers on the same link wait (see `Links`). `cpu_seconds`: CPU
    time taken from the rank's own core (fabrics on CPUs; measured). `hindrance`: how many seconds longer it takes if
    that core computes all the while, so that the library's threads wait for it. `blocks`: CUDA blocks that it holds
    (fabrics of GPUs). `memory_bytes`: traffic of a rank's memory meanwhile, reads and writes together. `note`: how
    `seconds` was found, where that is no measurement of such a call; empty where it is.
    """

    seconds: float
    transfer: float
    links: tuple[str, ...]
    cpu_seconds: float = 0.0
    blocks: int = 0
    memory_bytes: int = 0
    hindrance: float = 0.0
    note: str = ""

    def lasting(self, seconds: float) -> Delay:
        """The same exchange, if it took `seconds`: its share on the link stays the same share, and it is hindered in
        proportion."""
        if self.seconds <= 0:
            return replace(self, seconds=seconds, transfer=seconds)
        times = seconds / self.seconds
        return replace(self, seconds=seconds, transfer=self.transfer * times, hindrance=self.hindrance * times)


@runtime_checkable
class DelayModel(Protocol):
    """Says what a collective takes. A pure function: the same call has the same delay."""

    def delay(self, call: Call) -> Delay:
        """The delay of `call`. Raises RewriterError where the model has no answer for such a call."""
        ...

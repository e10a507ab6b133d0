"""How late emulated peers come to a collective: what ranks that compute for themselves would wait for each other."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rewriter.fabric import Call, Delay, DelayModel
from rewriter.fabric.overlap import Overlap


@dataclass(frozen=True)
class Late:
    """`model`, whose collectives start with the last peer of a group that has emulated ones: later than this rank by
    `Overlap.skew`, which is latency. `real` are the ranks that run. A message has no group to wait for."""

    model: DelayModel
    overlap: Overlap
    real: frozenset[int]

    def delay(self, call: Call) -> Delay:
        found, late = self.model.delay(call), self.late(call, 0.0)
        return replace(found, seconds=found.seconds + late) if late else found

    def late(self, call: Call, computed: float) -> float:
        """Seconds, after `computed` seconds of kernels since the collective before."""
        if call.kind == "send" or self.real.issuperset(call.ranks):
            return 0.0
        return self.overlap.skew(call.size, computed)

    def later(self, call: Call, computed: float) -> float:
        """By how much longer than `delay` says this rank waits after `computed` seconds."""
        return max(0.0, self.late(call, computed) - self.late(call, 0.0))

"""Collectives across nodes, from a model of one node and one of the network."""

from __future__ import annotations

from dataclasses import dataclass

from rewriter.fabric.alpha_beta import AlphaBeta, split
from rewriter.fabric.calls import Call
from rewriter.fabric.delays import Delay
from rewriter.fabric.measured_delays import Measured
from rewriter.fabric.rank_groups import occupied, place


@dataclass(frozen=True)
class Composed:
    """A group inside a node takes what `inside` says, and so does one for which it was measured across nodes. Another
    does the collective in each node and, with each rank's share, between nodes (`between`, whose ranks are nodes).
    Latencies add up; transfers overlap:

        seconds = latency inside + latency between + max(transfer inside, transfer between)

    Two nodes of 8 H100 with 8 adapters of 400 Gb/s reach by this 461 GB/s (all-reduce bus bandwidth of 256 MB), where
    about 470 are reported as expected (nccl-tests #290, NCCL #2409).
    """

    inside: Measured
    between: AlphaBeta
    formula: AlphaBeta  # of the whole fabric: names its links and its nodes

    def delay(self, call: Call) -> Delay:
        if call.size < 2:
            return Delay(0.0, 0.0, ())
        placement = place(call.ranks, self.formula.node)
        if placement.nodes == 1 or self.inside.covers(call):
            return self.inside.delay(call)
        near, far = split(call, placement.together, placement.nodes)
        if call.kind == "send":
            near, far = Call("send", 0, range(1)), Call("send", call.nbytes, range(2))
        there, beyond = self.inside.delay(near), self.between.delay(far)
        transfer = max(there.transfer, beyond.transfer)
        latency = there.seconds - there.transfer + beyond.seconds - beyond.transfer
        return Delay(
            latency + transfer,
            transfer,
            occupied(placement, self.formula.node, self.formula.inside, self.formula.between),
            cpu_seconds=there.cpu_seconds,
            hindrance=there.hindrance,
            note=f"{call.kind} across {placement.nodes} nodes: the network by formula (α-β), not measured",
        )

"""Links by latency and bandwidth (the α-β model), and what exchanges of a group of ranks take on them.

Bandwidths are of one direction; ranks send and receive at once. Every rank has a link of its own to other nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """`latency`: seconds of one step of an exchange. `bandwidth`: bytes per second that a rank receives."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Device:
    """`flops`: per second, as attention kernels sustain them. `memory`: bytes. `call`: seconds of each kernel call
    besides its arithmetic."""

    name: str
    flops: float
    memory: int
    call: float


@dataclass(frozen=True)
class Channel:
    """What a group of `ranks` exchanges through: `together` of them share a node, whose ranks are linked by `inside`;
    ranks of other nodes are reached by `between`.

    Times are seconds, for `nbytes` that every rank receives and sends.
    """

    ranks: int
    together: int
    inside: Link
    between: Link

    def gather(self, nbytes: float) -> float:
        """An all-gather, in rings: what a node lacks enters it once, through the links of all its members."""
        far = nbytes / self.together / self.between.bandwidth if self.nodes > 1 else 0.0
        return self._latency() + max(nbytes / self.inside.bandwidth if self.together > 1 else 0.0, far)

    def exchange(self, nbytes: float) -> float:
        """An all-to-all, or anything that goes straight from each rank to each other."""
        if self.ranks == 1:
            return 0.0
        near = (self.together - 1) / (self.ranks - 1)
        return self._latency() + max(
            nbytes * near / self.inside.bandwidth, nbytes * (1 - near) / self.between.bandwidth
        )

    def hop(self, nbytes: float) -> float:
        """One message between neighbours. All ranks wait for the pair with the slowest link."""
        link = self.between if self.nodes > 1 else self.inside
        return link.latency + nbytes / link.bandwidth

    @property
    def nodes(self) -> int:
        return self.ranks // self.together

    def _latency(self) -> float:
        """Of the steps of a ring through all ranks, which changes nodes as rarely as it can."""
        return (self.ranks - self.nodes) * self.inside.latency + (self.nodes - 1) * self.between.latency


@dataclass(frozen=True)
class Fabric:
    """Nodes of `node` ranks each, their devices and links."""

    name: str
    device: Device
    node: int
    inside: Link
    between: Link

    def channel(self, ranks: int, stride: int = 1, world: int | None = None) -> Channel:
        """The channel of groups of `ranks` at distance `stride` in a job of `world` ranks, which fills node by node.

        Of groups that lie unequally on nodes it is the worst.
        """
        if world is not None and world <= self.node:
            together = ranks
        elif self.node % stride:
            together = 1
        else:
            together = math.gcd(ranks, self.node // stride)
        return Channel(ranks, together, self.inside, self.between)

    @classmethod
    def uniform(cls, link: Link, device: Device) -> Fabric:
        """One link per rank, the same to all others."""
        return cls("uniform", device, 1, link, link)

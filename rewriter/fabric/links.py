"""Links by latency and bandwidth (the α-β model), devices, and what exchanges of a group of ranks take on links.

Bandwidths are of one direction; ranks send and receive at once. Every rank has a separate link to other nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Link:
    """`latency`: seconds of one step of an exchange. `bandwidth`: bytes per second that a rank receives. `shared`: the
    ranks of a node share it, so that exchanges of different groups wait for each other (a host's bus, one adapter);
    else every rank has its own."""

    latency: float
    bandwidth: float
    shared: bool = False


@dataclass(frozen=True)
class Device:
    """What one rank computes with.

    `flops`: per second, as attention kernels sustain them. `memory`: bytes. `call`: seconds of each kernel call besides
    its arithmetic, as plans for attention count it.

    `peak`: dense matrix products promised, FLOP per second by dtype ("float32", "bfloat16", "float16", "float8",
    "int8"); `efficiency`: the share of it that large products reach. `bandwidth`: of the memory, bytes per second
    promised; `memory_efficiency`: the share of it that kernels bound by memory reach. `launch`: seconds of the host per
    kernel, eager; `launch_graphed`: seconds between kernels of a CUDA graph. `multiprocessors`: SMs; cores on a CPU.
    `kernels`: the system whose measured kernels stand for its own (`rewriter.fabric.kernel_tables`); empty: none do.
    """

    name: str
    flops: float
    memory: int
    call: float
    peak: Mapping[str, float] = field(default_factory=dict, hash=False)
    efficiency: float = 1.0
    bandwidth: float = 0.0
    memory_efficiency: float = 1.0
    launch: float = 0.0
    launch_graphed: float = 0.0
    multiprocessors: int = 1
    kernels: str = ""


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

"""Devices, links by latency and bandwidth (the α-β model), and where groups of ranks lie on them.

Bandwidths are of one direction; ranks send and receive at once. Every rank has a separate link to other nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

KERNELS = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Link:
    """`latency`: seconds of one step of an exchange. `bandwidth`: bytes per second that a rank receives. `shared`: the
    ranks of a node share it, so that exchanges of different groups wait for each other (a host's bus, one adapter);
    else every rank has its own. `crossing`: seconds that a step takes longer in groups of more than half a node, whose
    ranks are of two sockets."""

    latency: float
    bandwidth: float
    shared: bool = False
    crossing: float = 0.0


@dataclass(frozen=True)
class Device:
    """The device that one rank computes with.

    `flops`: per second, as attention kernels sustain them. `memory`: bytes. `call`: seconds of each kernel call besides
    its arithmetic, as plans for attention count it.

    `peak`: dense matrix products promised, FLOP per second by dtype ("float32", "bfloat16", "float16", "float8",
    "int8"); `efficiency`: the share of it that large products reach. `bandwidth`: of the memory, bytes per second
    promised; `memory_efficiency`: the share of it that kernels bound by memory reach. `launch`: seconds of the host per
    kernel, eager; `launch_graphed`: seconds between kernels of a CUDA graph. `multiprocessors`: SMs; cores on a CPU.
    `kernels`: the system whose measured kernels stand for its own (`rewriter.fabric.kernel_tables`); empty: none do.
    `l2_bytes`: of the cache that all multiprocessors share; 0: not known. `tile`: rows of the smallest tile of a
    product: 16 on tensor cores, 1 where none are.
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
    l2_bytes: int = 0
    tile: int = 16


@cache
def kernel_systems() -> tuple[str, ...]:
    """The systems whose measured kernels ship."""
    return tuple(sorted(path.name[len("kernels-") : -len(".json.gz")] for path in KERNELS.glob("kernels-*.json.gz")))


@dataclass(frozen=True)
class Channel:
    """The links of a group of `ranks`: `together` of them share a node, whose ranks are linked by `inside`;
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
        """Seconds of the steps of a ring through all ranks, which changes nodes as rarely as it can."""
        return (self.ranks - self.nodes) * self.inside.latency + (self.nodes - 1) * self.between.latency


@dataclass(frozen=True)
class GroupPlacement:
    """`first`: the members of the group in its first rank's node. `nodes`: how many nodes it spans."""

    first: tuple[int, ...]
    nodes: int
    size: int

    @property
    def together(self) -> int:
        """Members per node; of nodes that hold unequally many, what the smallest does on average."""
        return max(1, self.size // self.nodes)


def place(ranks: Sequence[int], node: int) -> GroupPlacement:
    """Nodes and places of `ranks` in a job that fills nodes of `node` ranks in order. Takes as long for a
    large `range` as for a small one."""
    home = ranks[0] // node
    if isinstance(ranks, range):
        inside = range(home * node, (home + 1) * node)
        fewer, others = (inside, ranks) if node < len(ranks) else (ranks, inside)
        first = tuple(rank for rank in fewer if rank in others)
        low, high = min(ranks[0], ranks[-1]), max(ranks[0], ranks[-1])
        nodes = len(ranks) if abs(ranks.step) >= node else high // node - low // node + 1
    else:
        first = tuple(rank for rank in ranks if rank // node == home)
        nodes = len({rank // node for rank in ranks})
    return GroupPlacement(first, nodes, len(ranks))


def occupied(placement: GroupPlacement, node: int, inside: Link, between: Link | None) -> tuple[str, ...]:
    """Names of the links that an exchange holds: at most two per rank of one node, however large the group.

    Links of a rank are called `rank3` and, to other nodes, `rank3.network`; shared ones `node0` and `node0.network`.
    A group on several nodes is named by its first node: all its nodes do alike.
    """
    home = f"node{placement.first[0] // node}"
    names: list[str] = []
    if len(placement.first) > 1:
        names += [home] if inside.shared else [f"rank{rank}" for rank in placement.first]
    if placement.nodes > 1 and between is not None:
        names += [f"{home}.network"] if between.shared else [f"rank{rank}.network" for rank in placement.first]
    return tuple(names)

"""Collectives by formula: a latency α per step and a bandwidth B.

Of S bytes (counted as in `Call`) among n ranks, g of them on each of k nodes, a step costing α inside a node and α'
between nodes:

| algorithm    | all_reduce                      | all_gather, reduce_scatter      | broadcast, reduce |
|--------------|---------------------------------|---------------------------------|-------------------|
| ring         | 2 (n-1) α + 2 (n-1)/n S/B       | (n-1) α + (n-1)/n S/B           | (n-1) α + S/B     |
| tree         | 2 log2(n) α + 2 S/B             | –                               | log2(n) α + S/B   |
| hierarchical | that of g ranks inside, and that of k ranks with S/g between, one after the other                 |

all_to_all is (n-1) α + (n-1)/n S/B, gather and scatter α + (n-1)/n S/B, a send α + S/B, and a barrier is an all_reduce
of nothing. A ring changes nodes as rarely as it can: n - k of n - 1 steps stay inside, and B is the less of the link
inside and g links between. Where a tree has no formula for a collective, the ring's counts. As NCCL does, the fastest
is taken.

Formulas: Thakur, Rabenseifner & Gropp, IJHPCA 19(1), 2005; Sanders, Speck & Träff, Parallel Computing 35, 2009 (two
trees).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from rewriter.common.errors import RewriterError
from rewriter.fabric.calls import NO_DELAY, Call, Delay
from rewriter.fabric.links import GroupPlacement, Link, occupied, place

Wire = Literal["nvlink", "pci", "host"]
Algorithm = Literal["ring", "tree", "hierarchical"]


@dataclass(frozen=True)
class Steps:
    """Seconds at the start, and of a step inside a node and between nodes; the share of the bandwidth reached."""

    base: float
    inside: float
    between: float
    share: float


@dataclass(frozen=True)
class Protocol:
    """`ring`, `tree`: what a step takes by that algorithm. None: what the links say, with nothing at the start.

    `chained`: a tree passes the ranks of a node one after another, as NCCL's does.
    """

    name: str
    ring: Steps | None = None
    tree: Steps | None = None
    chained: bool = False

    def steps(self, algorithm: Literal["ring", "tree"], inside: Link, between: Link | None) -> Steps:
        own = self.ring if algorithm == "ring" else self.tree
        return own or Steps(0.0, inside.latency, between.latency if between else 0.0, 1.0)


PLAIN = Protocol("plain")
BY_FORMULA = "by formula (α-β)"  # in notes of delays


def nccl(wire: Wire) -> tuple[Protocol, ...]:
    """NCCL's protocols between ranks that NVLink or PCI joins, or that pass the host's memory, and a network beyond.

    Figures of its own tuning model, src/graph/tuning.cc of v2.30.7 (commit 5067397c): base latencies, latencies of a
    step over NVLink, PCI and a network, and the share of a ring's bandwidth that a protocol reaches. The caps of LL by
    GPU generation are left out: LL is chosen for messages that no bandwidth limits. A step through the host's memory is
    not told from one over PCI there; 2.6 µs is what all-reduces of up to 10 KB without peer access take: 12 µs among 2
    RTX 2080 Ti (all_reduce_perf), 23 among 4 RTX 4090 (xltzsoft/qwen3.8-27b-4x4090-sglang-tuning, tuning-record.md), 43
    among 8 (blog.chlc.cc/p/rtx4090-gpudirect-p2p-unlocked). Those of other protocols are assumed to be in proportion.
    """
    us = 1e-6
    inside = {
        "nvlink": {"ring": (0.6, 1.9, 3.4), "tree": (0.6, 1.25, 4.0)},
        "pci": {"ring": (1.0, 2.5, 5.7), "tree": (1.0, 1.9, 4.0)},
        "host": {"ring": (2.6, 6.5, 14.8), "tree": (2.6, 4.9, 10.4)},
    }[wire]
    base = {"ring": (6.6, 14.0, 8.4), "tree": (6.8, 14.0, 8.4)}
    between = {"ring": (2.7, 4.0, 14.0), "tree": (5.0, 8.5, 14.0)}
    share = {"ring": (0.5, 0.92, 1.0), "tree": (0.92 / 3.8, 0.92 * 7 / 9, 0.92)}

    def steps(algorithm: str, index: int) -> Steps:
        start, near, far = (table[algorithm][index] * us for table in (base, inside, between))
        return Steps(start, near, far, share[algorithm][index])

    return tuple(
        Protocol(name, steps("ring", index), steps("tree", index), chained=True)
        for index, name in enumerate(("LL", "LL128", "Simple"))
    )


@dataclass(frozen=True)
class AlphaBeta:
    """`inside` links the ranks of a node of `node` ranks, `between` the nodes.

    The fastest of ring, tree and, where a group spans nodes, hierarchical counts, and of `protocols`, the ways in which
    a library sends (NCCL: LL, LL128, Simple).
    """

    inside: Link
    between: Link | None = None
    node: int = 1
    protocols: tuple[Protocol, ...] = (PLAIN,)

    def delay(self, call: Call) -> Delay:
        """Raises RewriterError for a group that spans nodes where no link joins them."""
        if call.size < 2:
            return NO_DELAY
        placement, links = self.placed(call)
        spans = placement.nodes > 1 and placement.together > 1
        algorithms: tuple[Algorithm, ...] = ("ring", "tree", "hierarchical") if spans else ("ring", "tree")
        latency, transfer = min(
            (self.time(name, protocol, call, placement) for name in algorithms for protocol in self.protocols), key=sum
        )
        return Delay(latency + transfer, transfer, links, note=f"{BY_FORMULA}, not measured")

    def placed(self, call: Call) -> tuple[GroupPlacement, tuple[str, ...]]:
        """The nodes of the ranks of `call`, and the names of the links that it holds.

        Raises RewriterError for a group that spans nodes where no link joins them.
        """
        placement = place(call.ranks, self.node)
        if placement.nodes > 1 and self.between is None:
            raise RewriterError(
                f"{call.kind} among {call.size} ranks: they span {placement.nodes} nodes of {self.node}, and this "
                "fabric has no link between nodes. Take fewer ranks, or a fabric with a `between` link."
            )
        return placement, occupied(placement, self.node, self.inside, self.between)

    def time(self, algorithm: Algorithm, protocol: Protocol, call: Call, where: GroupPlacement) -> tuple[float, float]:
        """(latency, transfer) in seconds."""
        if algorithm == "hierarchical":
            g, nodes = where.together, where.nodes
            near, far = split(call, g, nodes)
            one_node = GroupPlacement(where.first[:g], 1, g)
            one_of_each = GroupPlacement(where.first[:1], nodes, nodes)
            stages = ((near, one_node), (far, one_of_each))
            times = [self.time("ring", protocol, part, placed) for part, placed in stages if placed.size > 1]
            return sum(latency for latency, _ in times), sum(transfer for _, transfer in times)
        steps = protocol.steps(algorithm, self.inside, self.between)
        n, k = where.size, where.nodes
        within = self.inside.bandwidth if where.together > 1 else math.inf
        across = self.between.bandwidth * where.together if self.between and k > 1 else math.inf
        bandwidth = min(within, across) * steps.share
        step_inside = steps.inside + (self.inside.crossing if 2 * where.together > self.node else 0.0)
        latency = (n - k) * step_inside + (k - 1) * steps.between
        part, size, kind = (n - 1) / n, call.nbytes / bandwidth, call.kind
        if kind in ("send", "gather", "scatter"):
            step = steps.between if k > 1 else step_inside
            return steps.base + step, size if kind == "send" else part * size
        if algorithm == "tree" and kind in ("all_reduce", "barrier", "broadcast", "reduce"):
            hops = where.together - 1 if protocol.chained else math.ceil(math.log2(where.together))
            depth = hops * step_inside + math.ceil(math.log2(k)) * steps.between
            both = 2 if kind in ("all_reduce", "barrier") else 1
            return steps.base + both * depth, both * size
        if kind in ("all_reduce", "barrier"):
            return steps.base + 2 * latency, 2 * part * size
        return steps.base + latency, (1 if kind in ("broadcast", "reduce") else part) * size


def split(call: Call, together: int, nodes: int) -> tuple[Call, Call]:
    """A collective as two: among the ranks of a node, and among one rank of each node with its share of the bytes.

    The ranks of both are counted from 0, the second's as if each were a node.
    """
    near, far = call.nbytes, math.ceil(call.nbytes / together)
    if call.kind in ("all_to_all", "gather", "scatter"):
        near, far = math.ceil(call.nbytes / nodes), call.nbytes
    return replace(call, nbytes=near, ranks=range(together)), replace(call, nbytes=far, ranks=range(nodes))

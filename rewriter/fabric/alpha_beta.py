"""Collectives by formula: a latency α per step and a bandwidth B.

Of S bytes (counted as in `Call`) among n ranks, g of them on each of k nodes, a step costing α inside a node and α'
between nodes:

| algorithm    | all_reduce                      | all_gather, reduce_scatter      | broadcast, reduce |
|--------------|---------------------------------|---------------------------------|-------------------|
| ring         | 2 (n-1) α + 2 (n-1)/n S/B       | (n-1) α + (n-1)/n S/B           | (n-1) α + S/B     |
| tree         | 2 log2(n) α + 2 S/B             | –                               | log2(n) α + S/B   |
| one-shot     | α + (n-1) S/B                   | α + (n-1)/n S/B                 | α + (n-1) S/B     |
| two-shot     | 2 α + 2 (n-1)/n S/B             | α + (n-1)/n S/B                 | –                 |
| hierarchical | that of g ranks inside, and that of k ranks with S/g between, one after the other                 |

all_to_all is (n-1) α + (n-1)/n S/B by ring and α + (n-1)/n S/B in one shot, gather and scatter α + (n-1)/n S/B, a send
α + S/B, and a barrier is an all_reduce of nothing. A ring changes nodes as rarely as it can: n - k of n - 1 steps stay
inside, and B is the less of the link inside and g links between. Where an algorithm has no formula for a collective,
the ring's counts.

Formulas: Thakur, Rabenseifner & Gropp, IJHPCA 19(1), 2005; Sanders, Speck & Träff, Parallel Computing 35, 2009 (two
trees).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from rewriter.fabric.calls import Call
from rewriter.fabric.delays import Delay
from rewriter.fabric.links import Link
from rewriter.fabric.protocols import PLAIN, Protocol
from rewriter.fabric.rank_groups import Placement, occupied, place, refuse_spanning

Algorithm = Literal["ring", "tree", "one-shot", "two-shot", "hierarchical", "auto"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)


@dataclass(frozen=True)
class AlphaBeta:
    """`inside` links the ranks of a node of `node` ranks, `between` the nodes.

    `algorithm` "auto" takes the fastest of ring and tree, as NCCL does, and hierarchical where a group spans nodes.
    `protocols` are the ways in which a library sends (NCCL: LL, LL128, Simple); the fastest counts.
    """

    inside: Link
    between: Link | None = None
    node: int = 1
    algorithm: Algorithm = "auto"
    protocols: tuple[Protocol, ...] = (PLAIN,)
    note: str = "by formula (α-β), not measured"

    def delay(self, call: Call) -> Delay:
        """Raises RewriterError for a group that spans nodes where no link joins them."""
        if call.size < 2:
            return Delay(0.0, 0.0, ())
        placement = place(call.ranks, self.node)
        refuse_spanning(call, placement, self.node, self.between)
        latency, transfer = min(self._candidates(call, placement), key=sum)
        links = occupied(placement, self.node, self.inside, self.between)
        return Delay(latency + transfer, transfer, links, note=self.note)

    def _candidates(self, call: Call, placement: Placement) -> list[tuple[float, float]]:
        """(latency, transfer) by each algorithm and protocol that may be chosen."""
        algorithms: tuple[Algorithm, ...] = (self.algorithm,)
        if self.algorithm == "auto":
            spans = placement.nodes > 1 and placement.together > 1
            algorithms = ("ring", "tree", "hierarchical") if spans else ("ring", "tree")
        return [self._time(name, protocol, call, placement) for name in algorithms for protocol in self.protocols]

    def _time(self, algorithm: Algorithm, protocol: Protocol, call: Call, placement: Placement) -> tuple[float, float]:
        if algorithm == "hierarchical":
            return self._hierarchical(protocol, call, placement)
        steps = protocol.steps("tree" if algorithm == "tree" else "ring", self.inside, self.between)
        n, k = placement.size, placement.nodes
        bandwidth = self._bandwidth(placement) * steps.share
        latency = (n - k) * steps.inside + (k - 1) * steps.between
        shot = steps.between if k > 1 else steps.inside
        part, size, kind = (n - 1) / n, call.nbytes / bandwidth, call.kind
        if kind == "send":
            return steps.base + shot, size
        if kind in ("gather", "scatter"):
            return steps.base + shot, part * size
        if algorithm in ("one-shot", "two-shot"):
            if kind in ("all_gather", "reduce_scatter", "all_to_all"):
                return steps.base + shot, part * size
            if kind in ("all_reduce", "barrier") and algorithm == "two-shot":
                return steps.base + 2 * shot, 2 * part * size
            if algorithm == "one-shot":
                return steps.base + shot, (n - 1) * size
        if algorithm == "tree" and kind in ("all_reduce", "barrier", "broadcast", "reduce"):
            hops = placement.together - 1 if protocol.chained else math.ceil(math.log2(placement.together))
            depth = hops * steps.inside + math.ceil(math.log2(k)) * steps.between
            both = 2 if kind in ("all_reduce", "barrier") else 1
            return steps.base + both * depth, both * size
        if kind in ("all_reduce", "barrier"):
            return steps.base + 2 * latency, 2 * part * size
        return steps.base + latency, (1 if kind in ("broadcast", "reduce") else part) * size

    def _hierarchical(self, protocol: Protocol, call: Call, placement: Placement) -> tuple[float, float]:
        g, k = placement.together, placement.nodes
        near, far = split(call, g, k)
        stages = []
        if g > 1:
            stages.append(self._time("ring", protocol, near, Placement(placement.first[:g], 1, g)))
        if k > 1:
            stages.append(self._time("ring", protocol, far, Placement(placement.first[:1], k, k)))
        return sum(latency for latency, _ in stages), sum(transfer for _, transfer in stages)

    def _bandwidth(self, placement: Placement) -> float:
        inside = self.inside.bandwidth if placement.together > 1 else math.inf
        between = math.inf
        if placement.nodes > 1 and self.between is not None:
            between = self.between.bandwidth * placement.together
        return min(inside, between)


def split(call: Call, together: int, nodes: int) -> tuple[Call, Call]:
    """A collective as two: among the ranks of a node, and among one rank of each node with its share of the bytes.

    The ranks of both are counted from 0, the second's as if each were a node.
    """
    near, far = call.nbytes, math.ceil(call.nbytes / together)
    if call.kind in ("all_to_all", "gather", "scatter"):
        near, far = math.ceil(call.nbytes / nodes), call.nbytes
    return (
        Call(call.kind, near, range(together), call.dtype, call.graphed),
        Call(call.kind, far, range(nodes), call.dtype, call.graphed),
    )

"""What expert parallelism sends between nodes, counted in recorded events (`rewriter.runtime.record_events`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rewriter.runtime.collectives.log import Event
from rewriter.training.expert_parallel import AXIS


@dataclass(frozen=True)
class ExpertTraffic:
    """Bytes that a rank sends to ranks of other nodes: gradients of experts, other gradients, and tokens both ways."""

    experts: float
    others: float
    tokens: float


def expert_traffic(events: Sequence[Event], local: int, rank: int) -> ExpertTraffic:
    """Of `rank`, of what `record_events` saw there, where nodes are `local` ranks that follow each other.

    Tokens are counted as they were sent. Sums of gradients are counted as a ring's, which sends 2 (P − 1) / P of the
    tensor to the next of P ranks.
    """
    found = {"experts": 0.0, "others": 0.0, "tokens": 0.0}
    for event in events:
        if event.kind == "wire" and event.axis == AXIS and event.to:
            crossing = (n for peer, n in zip(event.members, event.to, strict=True) if peer // local != rank // local)
            found["tokens"] += sum(crossing)
        elif event.kind == "start" and event.name in ("gradients of experts", "gradients"):
            following = event.members[(event.members.index(rank) + 1) % event.ranks]
            if following // local != rank // local:
                which = "experts" if event.name == "gradients of experts" else "others"
                found[which] += 2 * (event.ranks - 1) / event.ranks * event.bytes
    return ExpertTraffic(**found)

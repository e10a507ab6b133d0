"""On which nodes a group of ranks is, and which links its exchanges occupy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rewriter.fabric.calls import NO_DELAY, Call, Delay, DelayModel
from rewriter.fabric.links import Link


@dataclass(frozen=True)
class Placement:
    """`first`: the members of the group in its first rank's node. `nodes`: how many nodes it spans."""

    first: tuple[int, ...]
    nodes: int
    size: int

    @property
    def together(self) -> int:
        """Members per node; of nodes that hold unequally many, what the smallest does on average."""
        return max(1, self.size // self.nodes)


def place(ranks: Sequence[int], node: int) -> Placement:
    """Where `ranks` are in a job that fills nodes of `node` ranks in order. Takes as long for a large `range` as for a
    small one."""
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
    return Placement(first, nodes, len(ranks))


def occupied(placement: Placement, node: int, inside: Link, between: Link | None) -> tuple[str, ...]:
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


_OF_A_RANK = re.compile(r"rank\d+(?=$|\.network$)")


def directed_delay(model: DelayModel, call: Call, rank: int, receives: bool) -> Delay:
    """What `model` says of `call`, with the links that global `rank` itself can wait for: its own instead of those of
    other members, at most two however many ranks share a node. Each link has two directions: a send and a receive
    (`receives`) do not wait for each other, and a collective takes both. A group of one rank takes no time.
    """
    if call.size < 2:
        return NO_DELAY
    delay = model.delay(call)
    own = dict.fromkeys(_OF_A_RANK.sub(f"rank{rank}", link) for link in delay.links)
    ways = "<>" if call.kind != "send" else "<" if receives else ">"
    return replace(delay, links=tuple(link + way for link in own for way in ways))


def received_bytes(call: Call) -> float:
    """Bytes that a rank receives at least, and sends as many: of the rank that receives most."""
    n, size = call.size, float(call.nbytes)
    share = (n - 1) / n
    if call.kind == "all_reduce":
        return 2 * share * size
    if call.kind in ("broadcast", "reduce", "send"):
        return size if n > 1 else 0.0
    return share * size

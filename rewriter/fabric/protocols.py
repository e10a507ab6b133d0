"""How a library sends: what a collective and each of its steps cost by protocol.

NCCL's figures are those of its own tuning model, src/graph/tuning.cc of v2.30.7 (commit 5067397c): base latencies,
latencies of a step over NVLink, PCI and a network, and the share of a ring's bandwidth that a protocol reaches. The
caps of LL by GPU generation are left out: LL is chosen for messages that no bandwidth limits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rewriter.fabric.links import Link

Wire = Literal["nvlink", "pci"]


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


def nccl(wire: Wire) -> tuple[Protocol, ...]:
    """NCCL's protocols between ranks that NVLink or PCI joins, and a network beyond."""
    us = 1e-6
    inside = {
        "nvlink": {"ring": (0.6, 1.9, 3.4), "tree": (0.6, 1.25, 4.0)},
        "pci": {"ring": (1.0, 2.5, 5.7), "tree": (1.0, 1.9, 4.0)},
    }[wire]
    base = {"ring": (6.6, 14.0, 8.4), "tree": (6.8, 14.0, 8.4)}
    between = {"ring": (2.7, 4.0, 14.0), "tree": (5.0, 8.5, 14.0)}
    share = {"ring": (0.5, 0.92, 1.0), "tree": (0.92 / 3.8, 0.92 * 7 / 9, 0.92)}

    def steps(algorithm: str, index: int) -> Steps:
        return Steps(
            base[algorithm][index] * us,
            inside[algorithm][index] * us,
            between[algorithm][index] * us,
            share[algorithm][index],
        )

    return tuple(
        Protocol(name, steps("ring", index), steps("tree", index), chained=True)
        for index, name in enumerate(("LL", "LL128", "Simple"))
    )

"""Question to a delay model (`Call`), its answer (`Delay`), and the links that groups share (`Links`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, get_args, runtime_checkable

Kind = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
    "barrier",
]

KINDS: tuple[Kind, ...] = get_args(Kind)
SOCKETS = "sockets"
"""As a library: the runtime's own sums and gathers of small tensors (`rewriter.runtime.collectives.small_sums`)."""
_OF_A_RANK = re.compile(r"rank\d+(?=$|\.network$)")


@dataclass(frozen=True)
class Call:
    """A collective among `ranks`.

    `nbytes` counts bytes as nccl-tests does:

    | kind                               | bytes of                                       |
    |------------------------------------|------------------------------------------------|
    | all_reduce, reduce, broadcast      | the tensor, which is as large on every rank    |
    | all_gather, gather                 | the gathered tensor: all ranks' shards         |
    | reduce_scatter, scatter            | the full tensor, of which a rank gets a shard  |
    | all_to_all                         | one rank's input                               |
    | send                               | the message                                    |
    | barrier                            | nothing: 0                                     |

    `ranks`: global ranks of the group; a `range` where the world is large. A send has two: its ends. `graphed`: it is
    replayed from a CUDA graph, so that no launch costs time on the host. `norm`: the next kernel adds the sum to a
    residual and norms it, and nothing else reads the sum before.
    """

    kind: Kind
    nbytes: int
    ranks: tuple[int, ...] | range
    dtype: str = "float32"
    graphed: bool = False
    norm: bool = False

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Delay:
    """Duration of one collective, and what it occupies.

    `seconds`: from the last rank's arrival to completion, with nothing else on the link; measured ones hold what ranks
    wait for each other on average (nccl-tests, `rewrite fabrics calibrate`). `transfer`: the part of it during which it
    has the links in `links` for itself; other groups' transfers on the same link wait (see `Links`). `cpu_seconds`: CPU
    time taken from the rank's own core (fabrics on CPUs; measured). `hindrance`: how many seconds longer it takes if
    that core computes all the while, so that the library's threads wait for it. `blocks`: CUDA blocks that it holds
    (fabrics of GPUs). `memory_bytes`: traffic of a rank's memory meanwhile, reads and writes together. `note`: how
    `seconds` was found, where that is no measurement of such a call; empty where it is. `normed`: the residual is added
    and the sum normed, too, so that no kernel does it. `library`: whose collective it is, where several were to choose
    from.
    """

    seconds: float
    transfer: float
    links: tuple[str, ...]
    cpu_seconds: float = 0.0
    blocks: int = 0
    memory_bytes: int = 0
    hindrance: float = 0.0
    note: str = ""
    normed: bool = False
    library: str = ""

    def lasting(self, seconds: float) -> Delay:
        """The same exchange, if it took `seconds`: its share on the link stays the same share, and it is hindered in
        proportion."""
        if self.seconds <= 0:
            return replace(self, seconds=seconds, transfer=seconds)
        times = seconds / self.seconds
        return replace(self, seconds=seconds, transfer=self.transfer * times, hindrance=self.hindrance * times)


NO_DELAY = Delay(0.0, 0.0, ())
"""That of a group of one rank, which communicates nothing."""


@runtime_checkable
class DelayModel(Protocol):
    """Says what a collective takes. A pure function: the same call has the same delay."""

    def delay(self, call: Call) -> Delay:
        """The delay of `call`. Raises RewriterError where the model has no answer for such a call."""
        ...


@dataclass(frozen=True)
class Links:
    """Until when each link is taken, in seconds of the caller's clock. Immutable: `occupy` gives the state after.

    A link serves one transfer at a time, in the order of arrival. What a delay has beyond its transfer (latency,
    launches) overlaps with other groups' transfers:

        start = max(now, free[link] for each link of the delay);  end = start + seconds;
        free[link] = start + transfer
    """

    free: Mapping[str, float] = field(default_factory=dict)

    def occupy(self, now: float, delay: Delay) -> tuple[float, float, Links]:
        """(start, end, links after it) of an exchange whose last rank arrives at `now`."""
        start = max([now, *(self.free.get(link, now) for link in delay.links)])
        taken = {**self.free, **dict.fromkeys(delay.links, start + delay.transfer)}
        return start, start + delay.seconds, Links(taken)


def directed_delay(model: DelayModel, call: Call, rank: int, receives: bool) -> Delay:
    """Delay of `call` by `model`, with the links that global `rank` itself can wait for: its own instead of those of
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

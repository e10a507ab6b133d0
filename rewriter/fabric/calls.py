"""One collective, as a model of delays sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

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


@dataclass(frozen=True)
class Call:
    """A collective among `ranks`.

    `nbytes` counts bytes as nccl-tests does:

    | kind                               | bytes of                                       |
    |------------------------------------|------------------------------------------------|
    | all_reduce, reduce, broadcast      | the tensor, which is as large on every rank    |
    | all_gather, gather                 | the gathered tensor: all ranks' shards         |
    | reduce_scatter, scatter            | the whole tensor, of which a rank gets a shard |
    | all_to_all                         | one rank's whole input                         |
    | send                               | the message                                    |
    | barrier                            | nothing: 0                                     |

    `ranks`: global ranks of the group; a `range` where the world is large. A send has two: its ends. `graphed`: it is
    replayed from a CUDA graph, so that no launch costs time on the host.
    """

    kind: Kind
    nbytes: int
    ranks: tuple[int, ...] | range
    dtype: str = "float32"
    graphed: bool = False

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return len(self.ranks)

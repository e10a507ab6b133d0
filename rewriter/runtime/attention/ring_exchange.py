"""Ranks that pass blocks around while they compute: those of a row, of a column, or of a ring.

All of them run the same program and start the same shifts in the same order, so that messages of one pair are received
in the order in which they are sent: neither gloo, which matches messages of a pair by their order, nor NCCL, which runs
those of one group in their order, can mix them up, for any delays of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rewriter.runtime.attention.mesh import AttentionMesh
from rewriter.runtime.exchange import Tensors, Transfer, exchange_start, pack, shapes, unpack


@dataclass(frozen=True)
class RingExchange:
    """`members` are global ranks in their order around the ring; `place` is this rank's."""

    members: tuple[int, ...]
    place: int
    group: ProcessGroup | None

    @classmethod
    def row(cls, mesh: AttentionMesh) -> RingExchange:
        """The ranks of this row of the mesh, by column."""
        return cls(mesh.members[mesh.row :: mesh.rows], mesh.column, mesh.in_row)

    @classmethod
    def column(cls, mesh: AttentionMesh) -> RingExchange:
        """The ranks of this column of the mesh, by row."""
        first = mesh.rows * mesh.column
        return cls(mesh.members[first : first + mesh.rows], mesh.row, mesh.in_column)

    @property
    def size(self) -> int:
        return len(self.members)

    def shift(self, message: Tensor, places: int, name: str) -> Transfer:
        """Begin to send `message` to the rank `places` on; `wait` gives (what the rank `places` back sent,).

        `message` must not change before.
        """
        to, source = self.members[(self.place + places) % self.size], self.members[(self.place - places) % self.size]
        return exchange_start((message,), to, source, name, self.group)

    def blocks(self, own: Tensors, name: str) -> Iterator[tuple[int, Tensors]]:
        """(place, tensors) of every rank: this one's `own`, then those of the ranks one, two, … places on.

        Whenever one is given the next is already on its way, and there are no others in memory if the caller lets go of
        each before it asks for the next. Each block comes straight from its owner: as many bytes as if blocks were
        passed on from neighbour to neighbour, and no delay adds up.
        """
        if self.size == 1:
            yield self.place, own
            return
        message = pack(own)
        coming = self.shift(message, -1, name)
        yield self.place, own
        for step in range(2, self.size + 1):
            block = unpack(coming.wait()[0], own)
            if step < self.size:
                coming = self.shift(message, -step, name)
            else:
                del message, coming  # the last block is used without them
            yield (self.place + step - 1) % self.size, block
            del block

    def distance(self, place: int) -> int:
        """How many places on from here `place` is."""
        return (place - self.place) % self.size


class Returns:
    """Finished parts on their way to their owners, one at a time; `add(*tensors)` takes in each that arrives here."""

    def __init__(self, ring: RingExchange, name: str, add: Callable[..., object]) -> None:
        self.ring, self.name, self.add = ring, name, add
        self.pending: tuple[Transfer, Tensors] | None = None

    def send(self, parts: Tensors, dtypes: Sequence[torch.dtype], places: int) -> None:
        """Begin to send `parts`, rounded to `dtypes`, to the rank `places` on, after the message before has arrived."""
        like, message = shapes(parts, dtypes), pack(parts, dtypes)
        del parts  # wider sums are let go before what arrives is added
        self.finish()
        self.pending = self.ring.shift(message, places, self.name), like

    def finish(self) -> None:
        """Wait for the message under way, if there is one, and take it in."""
        if self.pending is not None:
            transfer, like = self.pending
            self.pending = None
            self.add(*unpack(transfer.wait()[0], like))

"""Exchanges of tensors between the ranks of an attention grid: by heads, and block by block around a row, a column or a
ring.

The exchange by heads (DeepSpeed Ulysses, arXiv 2309.14509) goes from all heads of a rank's tokens to a rank's heads of
more tokens, and back. With a grid of (P, 1, 1) it is the full algorithm; with h < P each of h sets of ranks is left
with attention over H/h heads, of any kind. q, k and v travel in one all-to-all, as one tensor. Key/value heads are
repeated only where there are fewer than h of them: max(K, h) travel. The gradients of the copies are summed in fp32
where the tokens live.

Around a ring all ranks run the same program and start the same shifts in the same order, so that messages of one pair
are received in the order in which they are sent: neither gloo, which matches messages of a pair by their order, nor
NCCL, which runs those of one group in their order, can mix them up, for any delays of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rewriter.kernels import accumulation_dtype
from rewriter.runtime.attention.mesh import AttentionMesh
from rewriter.runtime.collectives.exchange import (
    Tensors,
    Transfer,
    all_to_all_start,
    exchange_start,
    pack,
    shapes,
    unpack,
)


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
        """Number of places from here on to `place`."""
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


def interleaved(parts: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """Tensors of sorted tokens from those of several ranks: dimension 2 takes one token of each in turn."""
    return tuple(p[0] if len(p) == 1 else torch.stack(p, 3).flatten(2, 3) for p in zip(*parts, strict=True))


def to_heads(tensors: Sequence[Tensor], mesh: AttentionMesh, name: str) -> tuple[Tensor, ...]:
    """[B, heads, n, D] of own tokens → [B, max(heads / h, 1), h·n, D] of h ranks' tokens, for each of `tensors`.

    Rank a of h gets the heads that its query heads a·H/h … need. Tokens come out sorted: t ≡ i + r·j (mod rc).
    """
    parts = [[own_heads(t, rank, mesh.heads) for t in tensors] for rank in range(mesh.heads)]
    return interleaved(all_to_all_start(parts, mesh.by_heads, name).wait())


def to_tokens(tensors: Sequence[Tensor], mesh: AttentionMesh, name: str) -> tuple[Tensor, ...]:
    """The way back of `to_heads`: [B, heads, h·n, D] of h ranks' tokens → [B, h · heads, n, D] of own ones."""
    parts = [[t[:, :, rank :: mesh.heads] for t in tensors] for rank in range(mesh.heads)]
    arrived = all_to_all_start(parts, mesh.by_heads, name).wait()
    return tuple(torch.cat(t, 1) if mesh.heads > 1 else t[0] for t in zip(*arrived, strict=True))


def own_heads(x_BHSD: Tensor, rank: int, ranks: int) -> Tensor:
    """The run of heads that rank `rank` of `ranks` needs: one that others need too, where there are fewer heads than
    ranks."""
    heads = x_BHSD.shape[1]
    return x_BHSD.narrow(1, rank * heads // ranks, max(1, heads // ranks))


def summed_copies(x_BHSD: Tensor, heads: int) -> Tensor:
    """[B, heads, S, D]: neighbouring heads of `x` are gradients of copies of one."""
    copies = x_BHSD.shape[1] // heads
    if copies == 1:
        return x_BHSD
    return x_BHSD.unflatten(1, (heads, copies)).sum(2, dtype=accumulation_dtype(x_BHSD.dtype)).to(x_BHSD.dtype)

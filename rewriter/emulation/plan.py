"""Messages that a rank exchanges with all others in one collective, and their order.

That is the collective's own graph as one real rank sees it (NeuronaBox, arXiv 2405.02969, section 2.2): what passes
between other ranks is left out. Messages of one direction follow each other, so the graph is two chains with edges
between them: `PlannedMessage.needs` says how many messages of the other direction must be done first. Algorithms, their
segments and the two messages under way at any time are those of gloo (gloo/allreduce.cc, allgather.cc, broadcast.cc,
barrier.cc, alltoall.cc, reduce.cc), which torch uses on CPUs.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from rewriter.common.errors import RewriterError
from rewriter.fabric.calls import Kind

SEGMENT = 1 << 20  # bytes of gloo's largest segment of a reduction; and of a message: larger ones are cut
# Above it a collective has that many steps that their number, not the wire, would set the time that an emulation takes:
# the steps of a larger group travel together, as many as those of a group of this size, and with the same bytes.
RANKS = 16


class PlannedMessage(NamedTuple):
    """`length` bytes at `offset` of the tensor; it waits for the first `needs` messages of the other direction."""

    offset: int
    length: int
    needs: int
    reduced: bool = False  # what is received is summed up with what is there


class Plan(NamedTuple):
    """One rank's part of a collective: what it sends and what it receives, each in order."""

    sends: tuple[PlannedMessage, ...]
    receives: tuple[PlannedMessage, ...]

    @property
    def received_bytes(self) -> int:
        return sum(message.length for message in self.receives)


@lru_cache(maxsize=128)  # a program repeats few calls; a plan of a large tensor has a message for each segment
def plan(kind: Kind, nbytes: int, itemsize: int, ranks: int, rank: int, root: int | None) -> Plan:
    """The plan of `rank` (index in a group of `ranks` > 1) for a `Call` of `kind` and `nbytes`.

    `itemsize`: bytes of an element. `root`: index, for the kinds that have one. Raises RewriterError for another kind.
    """
    if ranks > RANKS:
        rank, root = _folded(rank, root, ranks)
        all_ranks, ranks = ranks, RANKS
        if kind not in ("broadcast", "send", "barrier"):  # (n - 1) / n of the tensor pass a link
            unit = itemsize * RANKS
            nbytes = round(nbytes * (all_ranks - 1) / all_ranks / (RANKS - 1) * RANKS / unit) * unit
    shard = nbytes // ranks
    if kind in ("all_reduce", "reduce_scatter"):  # torch's gloo reduces all, then takes its part
        made = _ring(nbytes, itemsize, ranks, rank, 2)
    elif kind == "reduce":
        made = _reduce(nbytes, itemsize, ranks, rank, rank == root)
    elif kind == "all_gather":
        made = _all_gather(shard, ranks)
    elif kind == "all_to_all":
        every = tuple(PlannedMessage((rank + i) % ranks * shard, shard, 0) for i in range(1, ranks))
        made = Plan(every, every)
    elif kind == "broadcast":
        made = _broadcast(nbytes, ranks, (rank - (root or 0)) % ranks)
    elif kind in ("gather", "scatter"):
        many = tuple(PlannedMessage(i * shard, shard, 0) for i in range(ranks) if i != root)
        one = (PlannedMessage(0, shard, 0),)
        made = Plan((), many) if rank == root else Plan(one, ())
        if kind == "scatter":
            made = Plan(made.receives, made.sends)
    elif kind == "send":
        one = (PlannedMessage(0, nbytes, 0),)
        made = Plan(one, ()) if rank == 0 else Plan((), one)
    elif kind == "barrier":  # dissemination: a round passes on what all rounds before brought
        rounds = tuple(PlannedMessage(0, 0, i) for i in range((ranks - 1).bit_length()))
        made = Plan(rounds, rounds)
    else:
        raise RewriterError(f"{kind}: a collective without a plan of its messages. Use --mode delay")
    if not made.receives:  # the rank must learn of the end
        made = Plan(made.sends, (PlannedMessage(0, 0, len(made.sends)),))
    return _cut(made)


def _cut(made: Plan) -> Plan:
    """The same with messages of at most SEGMENT bytes, so that their moments are spread over the time."""
    sent, received = ([0, *accumulate(max(1, -(-m.length // SEGMENT)) for m in chain)] for chain in made)

    def cut(chain: tuple[PlannedMessage, ...], other: list[int]) -> tuple[PlannedMessage, ...]:
        return tuple(
            PlannedMessage(m.offset + at, min(SEGMENT, m.length - at), other[m.needs], m.reduced)
            for m in chain
            for at in range(0, max(1, m.length), SEGMENT)
        )

    return Plan(cut(made.sends, received), cut(made.receives, sent))


def _folded(rank: int, root: int | None, ranks: int) -> tuple[int, int | None]:
    """The same place, as seen from the root, in a group of RANKS."""
    if root is None:
        return rank % RANKS, None
    distance = (rank - root) % ranks
    return (distance if distance < RANKS else distance % (RANKS - 1) + 1), 0


def segments(nbytes: int, itemsize: int, ranks: int) -> tuple[int, int]:
    """(bytes of a segment, segments of a rank's chunk) of gloo's ring: at least two, so that one travels while another
    is summed up."""
    largest = itemsize * (SEGMENT // itemsize)
    segment = _up(min(-(-nbytes // (2 * ranks)), largest), itemsize) or itemsize
    count = _up(max(-(-nbytes // segment), 2 * ranks), ranks)
    return segment, count // ranks


def _ring(nbytes: int, itemsize: int, ranks: int, rank: int, rounds: int) -> Plan:
    """n - 1 steps in which chunks are summed up and, with two `rounds`, n - 1 in which the sums go round.

    Messages are numbered segments. Those beyond the tensor's end do not travel, and nothing waits for them.
    """
    segment, per_rank = segments(nbytes, itemsize, ranks)
    half = (ranks - 1) * per_rank
    sends = [(rank + 1 - second) * per_rank + i for second in range(rounds) for i in range(half)]
    receives = [slot + per_rank for slot in sends]
    needs = [max(0, i - 1) for i in range(half)] + [half, half] + [i - 1 for i in range(half + 2, 2 * half)]

    def chain(mine: list[int], other: list[int], reduces: bool) -> tuple[PlannedMessage, ...]:
        offsets = [slot % (ranks * per_rank) * segment for slot in mine]
        travel = [slot % (ranks * per_rank) * segment < nbytes for slot in other]
        done = [0, *accumulate(travel)]
        return tuple(
            PlannedMessage(offset, min(segment, nbytes - offset), done[needs[i]], reduces and i < half)
            for i, offset in enumerate(offsets)
            if offset < nbytes
        )

    return Plan(chain(sends, receives, False), chain(receives, sends, True))


def _reduce(nbytes: int, itemsize: int, ranks: int, rank: int, is_root: bool) -> Plan:
    """The first half of the ring, after which the root gathers the sums."""
    ring = _ring(nbytes, itemsize, ranks, rank, 1)
    segment, per_rank = segments(nbytes, itemsize, ranks)
    chunk = per_rank * segment

    def gathered(one: int, after: int) -> tuple[PlannedMessage, ...]:
        length = min(chunk, nbytes - one * chunk)
        return (PlannedMessage(one * chunk, length, after),) if length > 0 else ()

    if not is_root:
        return Plan(ring.sends + gathered(rank, len(ring.receives)), ring.receives)
    others = [m for i in range(ranks) if i != rank for m in gathered(i, len(ring.sends))]
    return Plan(ring.sends, ring.receives + tuple(others))


def _all_gather(shard: int, ranks: int) -> Plan:
    """A ring of n - 1 steps, in halves: one is passed on while the other arrives."""
    half = shard // 2
    parts = (0, half), (half, shard - half)
    both = tuple(PlannedMessage(*parts[i % 2], max(0, i - 1)) for i in range(2 * (ranks - 1)))
    return Plan(both, both)


def _broadcast(nbytes: int, ranks: int, rank: int) -> Plan:
    """A binomial tree; `rank` counts from the root."""
    below = [rank + (1 << i) for i in range(rank.bit_length(), (ranks - 1).bit_length())]
    sends = tuple(PlannedMessage(0, nbytes, int(rank > 0)) for child in below if child < ranks)
    return Plan(sends, (PlannedMessage(0, nbytes, 0),) if rank else ())


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

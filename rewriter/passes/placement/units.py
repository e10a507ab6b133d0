"""Units of every rank: query heads and channels in equal runs, key/value heads where their queries are."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from rewriter.ir.labels import Unsplittable

# the mesh axis over which bodies are split
AXIS = "tp"
Ranges = tuple[tuple[int, int], ...]


def equal_runs(size: int, ranks: int) -> tuple[Ranges, ...]:
    """Per rank, its run of `size` elements, of which all ranks hold equally many."""
    local = size // ranks
    return tuple(((rank * local, (rank + 1) * local),) for rank in range(ranks))


@dataclass(frozen=True)
class Axis:
    """Units `first` to `first + count - 1`, all of one kind. `queries` is the axis of the query heads that these
    key/value heads serve, in equal runs."""

    first: int
    count: int
    quantum: str
    queries: Axis | None = None


class Units:
    """Unit numbers and, per rank, the units it holds in local order (key/value heads may repeat).

    `by_head`: every query head is a unit, also where each rank would hold whole groups of them. `axes` are the units
    by kind, in the order of labelling.
    """

    def __init__(self, ranks: int, by_head: bool = False) -> None:
        self.ranks, self.count, self.by_head = ranks, 0, by_head
        self.axes: list[Axis] = []
        self.held: list[list[int]] = [[] for _ in range(ranks)]
        self.known: dict[tuple[int, bytes], tuple[Ranges, ...]] = {}

    def channels(self, size: int, quantum: str) -> int:
        """`size` new units in equal runs; returns the first one's number."""
        if size % self.ranks:
            raise Unsplittable(f"{size} {quantum} do not divide by {self.ranks}")
        first, self.count = self.count, self.count + size
        self.axes.append(Axis(first, size, quantum))
        local = size // self.ranks
        for rank, units in enumerate(self.held):
            units += range(first + rank * local, first + (rank + 1) * local)
        return first

    def key_value_heads(self, query_heads: int, heads: int) -> int | None:
        """Key/value heads for `query_heads` equal runs of queries; None when one head serves all (it is replicated).

        Each rank holds the heads its queries read: a run, one head shared with other ranks, or, where neither count
        divides the other, one copy per query head.
        """
        if heads == 1:
            return None
        first, self.count = self.count, self.count + heads
        queries = next((axis for axis in reversed(self.axes) if axis.queries is None), None)
        self.axes.append(Axis(first, heads, "key/value heads", queries))
        local, group = query_heads // self.ranks, query_heads // heads
        for rank, units in enumerate(self.held):
            read = [(rank * local + q) // group for q in range(local)]
            distinct = sorted(set(read))
            uniform = local % len(distinct) == 0 and read == [
                h for h in distinct for _ in range(local // len(distinct))
            ]
            units += [first + h for h in (distinct if uniform else read)]
        if len({len(u) for u in self.held}) != 1:  # ranks differ in form: give every one a copy per query head
            for rank, units in enumerate(self.held):
                units[:] = [u for u in units if not first <= u < first + heads]
                units += [first + (rank * local + q) // group for q in range(local)]
        return first

    def ranges(self, profile: torch.Tensor) -> tuple[Ranges, ...]:
        """Per rank, the index ranges along a dimension whose elements have these labels; all ranks of one length.

        Elements that belong to no unit (the one key/value head in a fused projection) are held by every rank.
        """
        key = (self.count, profile.numpy().tobytes())  # the values of a body share few profiles
        if key not in self.known:
            self.known[key] = self._ranges(profile)
        return self.known[key]

    def _ranges(self, profile: torch.Tensor) -> tuple[Ranges, ...]:
        places: dict[int, list[tuple[int, int]]] = {}
        for unit, start, stop in _runs(profile.tolist()):
            places.setdefault(unit, []).append((start, stop))
        everywhere = places.pop(-1, [])
        result = []
        for units in self.held:
            wanted = Counter(unit for unit in units if unit in places)
            if any(count > 1 for count in wanted.values()):
                if everywhere:
                    raise Unsplittable("repeated key/value heads stand beside what belongs to no head")
                if any(len(runs) > 1 for runs in places.values()):
                    raise Unsplittable("repeated key/value heads are interleaved with others")
                result.append(tuple(places[unit][0] for unit in units if unit in places))
            else:
                result.append(_merge(sorted([*everywhere, *(run for unit in wanted for run in places[unit])])))
        sizes = {sum(b - a for a, b in ranges) for ranges in result}
        if len(sizes) != 1 or 0 in sizes:
            raise Unsplittable(f"the ranks would hold {sorted(sizes)} elements")
        return tuple(result)

    def uneven(self, labels: torch.Tensor) -> bool:
        """True if ranks would hold different numbers of the elements that have these labels."""
        places = Counter(labels.flatten().tolist())
        return len({sum(places[unit] for unit in held) for held in self.held}) > 1

    def owners(self, labels: torch.Tensor) -> torch.Tensor:
        """The rank that holds each element, by its label; -1 where it is the same for all."""
        owner, asked = torch.full((self.count + 1,), -1), set(labels.flatten().tolist())
        for rank, units in enumerate(self.held):
            for unit in units:
                if unit in asked and owner[unit] not in (-1, rank):
                    raise Unsplittable("heads that several ranks hold lie along two dimensions at once")
                owner[unit] = rank
        return owner[labels]  # -1 reads the last one, which no unit has

    @staticmethod
    def runs_of(owners: torch.Tensor, ranks: int) -> tuple[Ranges, ...]:
        """Per rank, the index ranges that it owns; all of one length."""
        runs = _runs(owners.tolist())
        result = tuple(_merge([(a, b) for owner, a, b in runs if owner == rank]) for rank in range(ranks))
        if len({sum(b - a for a, b in ranges) for ranges in result}) != 1 or not result[0]:
            raise Unsplittable("the ranks would hold different numbers of elements")
        return result

    def shared(self, profile: torch.Tensor) -> bool:
        """True if an element with these labels is held more than once."""
        if (profile == -1).any():
            return True
        units = set(profile.tolist())
        return sum(u in units for held in self.held for u in held) > len(units)

    def copies(self, profile: torch.Tensor) -> int | None:
        """Number of ranks that hold each element with these labels; None when some are held more often than others."""
        held = Counter(u for units in self.held for u in units)
        counts = {held[u] for u in set(profile.tolist()) - {-1}}
        return counts.pop() if len(counts) == 1 else None


def _runs(labels: list[int]) -> list[tuple[int, int, int]]:
    runs: list[tuple[int, int, int]] = []
    for i, unit in enumerate(labels):
        if runs and runs[-1][0] == unit:
            runs[-1] = (unit, runs[-1][1], i + 1)
        else:
            runs.append((unit, i, i + 1))
    return runs


def _merge(ranges: list[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for a, b in ranges:
        if merged and merged[-1][1] == a:
            merged[-1] = (merged[-1][0], b)
        else:
            merged.append((a, b))
    return tuple(merged)

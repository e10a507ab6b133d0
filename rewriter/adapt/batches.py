"""Which rows a rank computes when: the same rows in a step on any number of ranks, and after any interruption."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.data import Sampler

from rewriter.adapt.options import Schedule
from rewriter.adapt.run_ranks import RunRanks


class Order(Sampler[list[int]]):
    """The rows of every backward pass of a rank, in order: lists of `schedule.micro_batch` indices.

    Epochs follow one another, each another permutation of all rows; step g takes the next `schedule.batch` rows,
    and ranks take neighbouring parts of them. It depends on the seed and the rows alone.
    """

    def __init__(self, rows: int, schedule: Schedule, ranks: RunRanks, seed: int) -> None:
        self.rows, self.schedule, self.ranks, self.seed = rows, schedule, ranks, seed

    def __len__(self) -> int:
        return self.schedule.steps * self.schedule.accumulation

    def __iter__(self) -> Iterator[list[int]]:
        stream, size = self._stream(), self.schedule.micro_batch
        for _ in range(self.schedule.steps):
            step = [next(stream) for _ in range(self.schedule.batch)]
            own = self.schedule.accumulation * size
            mine = step[self.ranks.replica * own : (self.ranks.replica + 1) * own]
            yield from (mine[i : i + size] for i in range(0, own, size))

    def _stream(self) -> Iterator[int]:
        epoch = 0
        while True:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            yield from torch.randperm(self.rows, generator=generator).tolist()
            epoch += 1


def stack(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Rows [S] as a batch [B, S]."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

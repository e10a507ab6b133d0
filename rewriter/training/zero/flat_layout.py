"""Where parameters stand in flat tensors: in those that FSDP2 communicates, in ours, where each begins with a block,
and in the equal slices that ranks own.

Otherwise a parameter would share a block and a scale with its neighbour: the gradient of a bias beside
that of a matrix a thousand times as large would be lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class OwnedPiece:
    """Elements `start` to `end` of a parameter (`source`), which stand from `at` on in the slice of rank `owner`
    (`place`)."""

    parameter: int
    owner: int
    start: int
    end: int
    at: int

    @property
    def source(self) -> slice:
        return slice(self.start, self.end)

    @property
    def place(self) -> slice:
        return slice(self.at, self.at + self.end - self.start)


def owned_pieces(parameter: int, begin: int, count: int, size: int) -> Iterator[OwnedPiece]:
    """The pieces of a parameter of `count` elements from `begin` on in a flat tensor, of which rank r owns elements
    r · size to (r + 1) · size."""
    for owner in range(begin // size, -(-(begin + count) // size)):
        first, last = max(begin, owner * size), min(begin + count, (owner + 1) * size)
        if first < last:
            yield OwnedPiece(parameter, owner, first - begin, last - begin, first - owner * size)


class BlockLayout:
    """`sizes` elements of each parameter, one after the other (N in all); in blocks, zeros fill up each one's last
    (M in all, a multiple of `block`)."""

    def __init__(self, sizes: Sequence[int], block: int) -> None:
        self.sizes = tuple(sizes)
        self.padded = tuple(-(-size // block) * block for size in sizes)
        self.n, self.m = sum(self.sizes), sum(self.padded)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Of each parameter in blocks."""
        return tuple(accumulate(self.padded, initial=0))[:-1]

    def blocked(self, x_RN: Tensor) -> Tensor:
        """x_RM; `x_RN` itself where every parameter fills its blocks."""
        if self.n == self.m:
            return x_RN
        x_RM = x_RN.new_zeros(x_RN.shape[0], self.m)
        torch._foreach_copy_(self._views(x_RM), list(x_RN.split(self.sizes, dim=1)))
        return x_RM

    def unblocked(self, x_RM: Tensor, out_RN: Tensor) -> None:
        """The reverse of `blocked`, rounded to the dtype of `out_RN`."""
        torch._foreach_copy_(list(out_RN.split(self.sizes, dim=1)), self._views(x_RM))

    def _views(self, x_RM: Tensor) -> list[Tensor]:
        return [x_RM[:, start : start + size] for start, size in zip(self.starts, self.sizes, strict=True)]

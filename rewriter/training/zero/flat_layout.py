"""Where parameters stand in the flat tensors that FSDP2 communicates, and in ours, where each begins with a block.

Without that a block would hold the end of one parameter and the beginning of the next, and one scale for both: the
gradient of a bias beside that of a matrix a thousand times as large would be lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor


class Layout:
    """`sizes` elements of each parameter, one after the other (N in all); in blocks, zeros fill up each one's last
    (M in all, a multiple of `block`)."""

    def __init__(self, sizes: Sequence[int], block: int) -> None:
        self.sizes, self.block = tuple(sizes), block

    @cached_property
    def padded(self) -> tuple[int, ...]:
        return tuple(-(-size // self.block) * self.block for size in self.sizes)

    @property
    def n(self) -> int:
        return sum(self.sizes)

    @property
    def m(self) -> int:
        return sum(self.padded)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Of each parameter in blocks."""
        return tuple(sum(self.padded[:i]) for i in range(len(self.sizes)))

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

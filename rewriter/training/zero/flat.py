"""Parameters as parts of flat tensors: of ours, of which each rank owns, and steps, an equal slice; and of those that
FSDP2 communicates, in blocks.

Shape suffixes: N elements of the flat tensor, S = N / ranks of a slice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from rewriter.common.errors import RewriterError
from rewriter.runtime.collectives.exchange import all_gather_flat
from rewriter.runtime.collectives.log import observe
from rewriter.runtime.collectives.process_groups import group_rank, group_size

ALIGNMENT = 64  # bytes: kernels that read vectors want parameters to begin where an allocation might


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


@dataclass(eq=False)
class FlatParameter:
    """A parameter, and the piece of it that this rank steps, with its master weight; None where it steps nothing of it.

    The gradient of the master stands in `gradient`, in the master weights' dtype, from the first backward pass on.
    """

    name: str
    parameter: nn.Parameter
    start_N: int
    mine: OwnedPiece | None
    master: nn.Parameter | None = None
    gradient: Tensor | None = None


def accumulate_gradient(master: nn.Parameter | None, memory: Tensor | None, part: Tensor) -> None:
    """Add `part` to the gradient of a master weight, which stands in `memory`."""
    assert master is not None
    assert memory is not None
    if master.grad is None:
        master.grad = memory.copy_(part)
    else:
        master.grad.add_(part)


class FlatParameters:
    """Moves `parameters` (one dtype, one device) into `data_N`.

    Masters are fp32 copies of the own slice, or the slice itself where parameters are at least as wide.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], group: ProcessGroup | None) -> None:
        self.group, self.ranks = group, group_size(group)
        first = named[0][1]
        unit = ALIGNMENT // first.element_size()
        starts, total = [], 0
        for _, parameter in named:
            starts.append(total)
            total += -(-parameter.numel() // unit) * unit
        self.size = -(-total // (self.ranks * unit)) * unit
        self.data_N = torch.zeros(self.ranks * self.size, dtype=first.dtype, device=first.device)
        own = group_rank(group)
        self.own_S = self.data_N[own * self.size : (own + 1) * self.size]
        self.parameters = []
        for i, ((name, parameter), start) in enumerate(zip(named, starts, strict=True)):
            place = self.data_N[start : start + parameter.numel()].view(parameter.shape)
            place.copy_(parameter.detach())
            parameter.data = place
            pieces = owned_pieces(i, start, parameter.numel(), self.size)
            mine = next((piece for piece in pieces if piece.owner == own), None)
            self.parameters.append(FlatParameter(name, parameter, start, mine))
        dtype = torch.promote_types(first.dtype, torch.float32)
        self.master_S = self.own_S if dtype == first.dtype else self.own_S.to(dtype)
        self.gradient_S = torch.zeros(self.size, dtype=dtype, device=first.device)
        for held in self.parameters:
            if held.mine is not None:
                held.master = nn.Parameter(self.master_S[held.mine.place])
                held.gradient = self.gradient_S[held.mine.place]

    @property
    def separate(self) -> bool:
        """True where master weights are other memory than the parameters."""
        return self.master_S is not self.own_S

    def read_master(self, held: FlatParameter) -> None:
        """Take the value that the parameter was loaded with."""
        if held.mine is not None and held.master is not None and self.separate:
            held.master.copy_(held.parameter.detach().view(-1)[held.mine.source])

    def check(self) -> None:
        """Raises RewriterError for a parameter that is no view of the flat tensor any more."""
        for held in self.parameters:
            expected = self.data_N.data_ptr() + held.start_N * self.data_N.element_size()
            if held.parameter.data_ptr() != expected or held.parameter.dtype != self.data_N.dtype:
                raise RewriterError(
                    f"zero_optimizer: parameter {held.name} was moved, converted or replaced since (it is "
                    f"{held.parameter.dtype} on {held.parameter.device}). Call .to() and load with assign=True before "
                    "the optimizer is made"
                )

    def publish(self) -> None:
        """Round the master weights to the parameters' dtype, and give all ranks all slices, in one collective."""
        if self.separate:
            self.own_S.copy_(self.master_S)
        if self.ranks > 1:
            observe("all_gather", f"parameters {self.data_N.dtype}".replace("torch.", ""), self.data_N, self.group)
            all_gather_flat(self.data_N, self.own_S, group=self.group)


class BlockLayout:
    """`sizes` elements of each parameter, one after the other (N in all); in blocks, zeros fill up each one's last
    (M in all, a multiple of `block`).

    Each parameter begins with a block: with a block and a scale in common, the gradient of a bias would be lost next to
    that of a matrix a thousand times as large.
    """

    def __init__(self, sizes: Sequence[int], block: int) -> None:
        self.sizes = tuple(sizes)
        self.padded = tuple(-(-size // block) * block for size in sizes)
        self.n, self.m = sum(self.sizes), sum(self.padded)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first element of each parameter in blocks."""
        return tuple(itertools.accumulate(self.padded, initial=0))[:-1]

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

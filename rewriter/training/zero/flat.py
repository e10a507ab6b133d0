"""Parameters of one dtype as views of one flat tensor, of which each rank owns, and steps, an equal slice.

Shape suffixes: N elements of the flat tensor, S = N / ranks of a slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from rewriter.common.errors import RewriterError
from rewriter.runtime.collectives.exchange import all_gather_flat
from rewriter.runtime.collectives.log import observe
from rewriter.runtime.collectives.process_groups import group_rank, group_size
from rewriter.training.zero.flat_layout import OwnedPiece, owned_pieces

ALIGNMENT = 64  # bytes: kernels that read vectors want parameters to begin where an allocation might


@dataclass(eq=False)
class FlatParameter:
    """A parameter, its pieces in order of their owners, and what this rank steps of it: a master, or nothing.

    The gradient of the master stands in `gradient`, in the master weights' dtype, from the first backward pass on.
    """

    name: str
    parameter: nn.Parameter
    start_N: int
    pieces: list[OwnedPiece]
    mine: OwnedPiece | None = None
    master: nn.Parameter | None = None
    gradient: Tensor | None = None

    def accumulate(self, part: Tensor) -> None:
        assert self.master is not None
        assert self.gradient is not None
        accumulate(self.master, self.gradient, part)


def accumulate(master: nn.Parameter, memory: Tensor, part: Tensor) -> None:
    """Add `part` to the gradient of a master weight, which stands in `memory`."""
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
            pieces = list(owned_pieces(i, start, parameter.numel(), self.size))
            self.parameters.append(FlatParameter(name, parameter, start, pieces))
        dtype = torch.promote_types(first.dtype, torch.float32)
        self.master_S = self.own_S if dtype == first.dtype else self.own_S.to(dtype)
        self.gradient_S = torch.zeros(self.size, dtype=dtype, device=first.device)
        for held in self.parameters:
            held.mine = next((piece for piece in held.pieces if piece.owner == own), None)
            if held.mine is not None:
                held.master = nn.Parameter(self.master_S[held.mine.place])
                held.gradient = self.gradient_S[held.mine.place]

    @property
    def separate(self) -> bool:
        """Whether master weights are other memory than the parameters."""
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

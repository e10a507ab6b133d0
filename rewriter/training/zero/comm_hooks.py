"""FSDP2's own collectives, with quantized messages: what `set_custom_all_gather` and `set_custom_reduce_scatter` take.

FSDP2 calls them with flat tensors that hold all parameters of a group, one after the other, padded to equal sizes: a
rank's part is one row here. Every parameter begins with a new block, and parameters of all shapes go the same way.
Both are called on FSDP2's own streams, and have written their output when the stream has passed them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from rewriter.common.errors import RewriterError
from rewriter.kernels import parse_format, parse_formats
from rewriter.runtime.collectives.log import observe
from rewriter.runtime.quantized.launch import all_gather, reduce_scatter
from rewriter.training.zero.flat import BlockLayout
from rewriter.training.zero.fsdp import (
    AllGather,
    DefaultAllGather,
    DefaultAllocMixin,
    ParameterGroup,
    ReduceScatter,
    reduction_factor,
)

_exact = False  # whether a block of `exact_weights` is running


@contextmanager
def exact_weights(model: nn.Module) -> Iterator[None]:
    """While the block runs, FSDP2 gathers the weights of `model` as they are, also after `zero_plus_plus`.

    For measuring what is stored. All ranks enter and leave it together, outside of forward and backward.
    """
    global _exact
    before, _exact = _exact, True
    free_gathered(model)
    try:
        yield
    finally:
        _exact = before
        free_gathered(model)


def free_gathered(model: nn.Module) -> None:
    """Free the whole parameters that FSDP2 may have kept: their shards change, or are to be gathered in another way."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class QuantizedAllGather(DefaultAllocMixin, AllGather):
    """qwZ (arXiv 2306.10209, section 3.1): weights travel quantized, and every rank computes with what arrived.

    A rank's own shard too is replaced by its dequantized values, in the gathered copy only: all ranks hold equal bits,
    and the shard that the optimizer steps is not touched. Rounding is to nearest, so that a second gather of the same
    shard, in backward, gives what forward computed with.

    A gather among fewer ranks is that of hpZ's secondary partition, which holds dequantized values: it is exact, since
    rounding them again, in other blocks, would give backward other weights than forward's.
    """

    def __init__(self, mesh: DeviceMesh, format: str, sizes: Sequence[int], name: str, secondary_axis: str) -> None:
        self.mesh, self.format, self.name, self.secondary_axis = mesh, format, name, secondary_axis
        self.layout = BlockLayout(sizes, parse_format(format).block)
        self._exact = DefaultAllGather()

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        ranks = group.size()
        if _exact or ranks != self.mesh.size():
            if not _exact:
                received = input_tensor.nbytes * (ranks - 1)
                observe("wire", f"{self.name} secondary", input_tensor, group, received, received, self.secondary_axis)
            return self._exact(output_tensor, input_tensor, group, async_op)
        # `input_tensor` is a part of `output_tensor`: it is quantized before anything is written there
        mine = self.layout.blocked(input_tensor.view(1, -1))[0]
        output_RN = output_tensor.view(ranks, -1)
        in_place = self.layout.n == self.layout.m
        found_RM = output_RN if in_place else output_RN.new_empty(ranks, self.layout.m)
        all_gather(mine, self.mesh, self.format, dtype=mine.dtype, out=found_RM, name=self.name)
        if not in_place:
            self.layout.unblocked(found_RM, output_RN)
        return None


class QuantizedReduceScatter(DefaultAllocMixin, ReduceScatter):
    """qgZ (sections 3.3 and B.3): gradients are summed inside the node, requantized, then summed between nodes.

    Sums are made in fp32 and rounded once, to FSDP2's reduction dtype; a rank's own part is never quantized. Dither
    makes the error's mean over ranks and steps zero: its seed advances with every call, on all ranks, and differs
    between the replicas of HSDP, whose errors are averaged too.
    """

    def __init__(
        self, mesh: DeviceMesh, format: str, parameters: ParameterGroup, name: str, seeds: SeedCounter
    ) -> None:
        self.mesh, self.format, self.name, self.seeds = mesh, format, name, seeds
        self.parameters = parameters
        self.block = max(hop.block for hop in parse_formats(format))

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        ranks = group.size()
        rows_RN = input_tensor.view(ranks, -1)
        layout = BlockLayout([p.padded for p in self.parameters.reduced], self.block)
        if rows_RN.shape[1] != layout.n:
            raise RewriterError(
                f"gradients: FSDP2 reduces {rows_RN.shape[1]} elements of {self.name}, and parameters with gradients "
                f"have {layout.n}: this version of torch chooses them otherwise. Leave `gradients` out"
            )
        replicas, replica = self.parameters.replicas
        mine_M = reduce_scatter(
            layout.blocked(rows_RN),
            self.mesh,
            self.format,
            seed=self.seeds.next() * replicas + replica,
            factor=reduction_factor(op, ranks),
            name=self.name,
        )
        layout.unblocked(mine_M[None], output_tensor[None])


class SeedCounter:
    """A number for every reduction that dithers, the same on all ranks, since these call in the same order."""

    def __init__(self) -> None:
        self.calls = 0

    def next(self) -> int:
        self.calls += 1
        return self.calls

"""ZeRO++ (arXiv 2306.10209) on FSDP2: quantized weights (qwZ), a secondary partition (hpZ), quantized gradients
(qgZ).

They are FSDP2's own collectives with quantized messages: what `set_custom_all_gather` and `set_custom_reduce_scatter`
take. FSDP2 calls them with flat tensors that hold all parameters of a group, one after the other, padded to equal
sizes: a rank's part is one row here. Every parameter begins with a new block, and parameters of all shapes go the same
way. Both are called on FSDP2's own streams, and have written their output when the stream has passed them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from rewriter.common.errors import RewriterError
from rewriter.kernels import DTYPES, parse_format, parse_formats
from rewriter.runtime.collectives.log import observe
from rewriter.runtime.quantized.launch import all_gather, reduce_scatter
from rewriter.runtime.quantized.schedules import known_format
from rewriter.training.zero.flat import BlockLayout
from rewriter.training.zero.fsdp import (
    AllGather,
    DefaultAllGather,
    DefaultAllocMixin,
    ParameterGroup,
    ReduceScatter,
    groups_of,
    reduction_factor,
)
from rewriter.training.zero.nodes import LOCAL, divides, node_groups, ranks_per_node


def zero_plus_plus(
    model: nn.Module,
    *,
    weights: str | None = None,
    gradients: str | None = None,
    secondary: int | None = None,
    node: int | None = None,
) -> None:
    """Make FSDP2's communication of `model` that of ZeRO++, in place. Call it after `fully_shard`, before the first
    forward, on all ranks.

    weights: the format that parameters are gathered in (qwZ), such as "int8"; rotated ones do badly on vectors of equal
    elements, such as the weights of a new norm, which plain ones hold well. gradients: that of reductions, inside
    the node and between nodes (qgZ), such as "int8/int4-hadamard"; dithered, so not fp8. None leaves either as it is.
    secondary: keep a copy of what forward gathered among groups of this number of neighbouring ranks until backward,
    which then gathers from them (hpZ). Backward then computes with forward's weights, quantized or not; a forward pass
    gathers anew once a torch optimizer has stepped or weights were written to (not through `.data`: call `reshard()`
    then). Usually the ranks of a node; any number that divides the ranks. node: ranks per node; default what
    LOCAL_WORLD_SIZE says, else `secondary`.

    Dither begins anew with each call of this: training that is resumed goes on as well, and not to the bit.

    Works with gradient accumulation of either kind, mixed precision, and divide factors of gradients. Weights are read
    from and gradients written to FSDP2's own buffers; the shards that the optimizer steps are never quantized.

    Raises RewriterError where `model` is not sharded by FSDP2, a number does not divide the ranks, a module's
    parameters are gathered in several dtypes, or FSDP2 was given other communication.
    """
    if weights is None and gradients is None and secondary is None:
        raise RewriterError("zero_plus_plus: nothing to do. Pass weights=, gradients= or secondary=")
    if weights is not None:
        known_format(weights, "zero_plus_plus: weights", parse_format)
    if gradients is not None:
        known_format(gradients, "zero_plus_plus: gradients", partial(parse_formats, dithered=True))
    groups = [group for group in groups_of(model, "zero_plus_plus") if group.process_group.size() > 1]
    ranks = _ranks(model, groups)
    if secondary is not None:
        divides("secondary", secondary, ranks)
    local = None  # ranks per node, where anything is quantized
    if groups and (weights is not None or gradients is not None):
        local = ranks_per_node(groups[0].process_group, node, secondary)
        if weights is not None:
            for group in groups:
                _one_dtype(group)
    inside = secondary is not None and local is not None and local % secondary == 0
    made, seeds = cache(node_groups), SeedCounter()  # parameter groups share process groups of each shape
    for index, group in enumerate(groups):
        name, device = f"{group.name} {index}", group.mesh.device_type
        gather = scatter = None
        if local is not None and weights is not None:
            sizes = [p.padded for p in group.parameters]
            axis = LOCAL if inside else "secondary"
            gather = QuantizedAllGather(made(group.process_group, local, device), weights, sizes, name, axis)
        if local is not None and gradients is not None:
            scatter = QuantizedReduceScatter(made(group.process_group, local, device), gradients, group, name, seeds)
        group.set_comms(gather, scatter)
        if secondary is not None and secondary < ranks and group.reshards:
            group.keep_in(made(group.process_group, secondary, device) if secondary > 1 else None)


def _ranks(model: nn.Module, groups: list[ParameterGroup]) -> int:
    """The number of ranks that all groups are sharded over."""
    sizes = {group.process_group.size() for group in groups}
    if len(sizes) > 1:
        raise RewriterError(
            f"zero_plus_plus: modules of {type(model).__name__} are sharded over {sorted(sizes)} ranks, expected one "
            "number. Call it on each part that is sharded alike"
        )
    return sizes.pop() if sizes else 1


def _one_dtype(group: ParameterGroup) -> None:
    dtypes = group.gathered_dtypes
    if len(dtypes) > 1 or not all(dtype in DTYPES for dtype in dtypes):
        raise RewriterError(
            f"weights: parameters of {group.name} are gathered as {sorted(map(str, dtypes))}, expected one of "
            f"{[str(dtype) for dtype in DTYPES]} for all. Set MixedPrecisionPolicy(param_dtype=…), or shard the module "
            "that holds the others by itself"
        )


_exact = False  # True while a block of `exact_weights` runs


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
        blocks_RM = output_RN if in_place else output_RN.new_empty(ranks, self.layout.m)
        all_gather(mine, self.mesh, self.format, dtype=mine.dtype, out=blocks_RM, name=self.name)
        if not in_place:
            self.layout.unblocked(blocks_RM, output_RN)
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

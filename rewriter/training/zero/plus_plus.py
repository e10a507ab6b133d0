"""ZeRO++ (arXiv 2306.10209) on FSDP2: quantized weights (qwZ), a secondary partition (hpZ), quantized gradients
(qgZ)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from torch import nn

from rewriter.common.errors import RewriterError
from rewriter.kernels import DTYPES, parse_format, parse_formats
from rewriter.runtime.quantized.schedules import known_format
from rewriter.training.zero.comm_hooks import QuantizedAllGather, QuantizedReduceScatter, SeedCounter
from rewriter.training.zero.fsdp import ParameterGroup, groups_of
from rewriter.training.zero.nodes import LOCAL, divides, node_groups, ranks_per_node


@dataclass(frozen=True)
class ZeroPlusPlus:
    """The report of `zero_plus_plus`: what it has set, and its memory on each rank, in bytes (the paper's figure 12).

    ranks: that parameters are sharded over (P). node: of these, neighbours that share a node. parameters: their number,
    over all ranks. primary_bytes: the shards that the optimizer steps. secondary_bytes: hpZ's, in the dtype that
    parameters are computed in, held from a layer's forward to its backward; kept_bytes: what FSDP2 keeps whole
    meanwhile, which is not gathered again (by default, what the root module holds itself).
    """

    ranks: int
    node: int | None
    secondary: int | None
    parameters: int
    primary_bytes: int
    secondary_bytes: int
    kept_bytes: int


def zero_plus_plus(
    model: nn.Module,
    *,
    weights: str | None = None,
    gradients: str | None = None,
    secondary: int | None = None,
    node: int | None = None,
) -> ZeroPlusPlus:
    """Make FSDP2's communication of `model` that of ZeRO++, in place. Call it after `fully_shard`, before the first
    forward, on all ranks.

    weights: the format that parameters are gathered in (qwZ), such as "int8"; rotated ones do badly on vectors of equal
    elements, such as the weights of a new norm, which plain ones hold well. gradients: that of reductions, inside
    the node and between nodes (qgZ), such as "int8/int4-hadamard"; dithered. None leaves either as it is. secondary:
    keep a copy of what forward gathered among groups of this number of neighbouring ranks until backward, which then
    gathers from them (hpZ). Backward then computes with forward's weights, quantized or not; a forward pass gathers
    anew once a torch optimizer has stepped or weights were written to (not through `.data`: call `reshard()` then).
    Usually the ranks of a node; any number that divides the ranks. node: ranks per node; default what LOCAL_WORLD_SIZE
    says, else `secondary`.

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
        known_format(gradients, "zero_plus_plus: gradients", parse_formats)
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
    return _memory(groups, ranks, local, secondary)


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


def _memory(groups: list[ParameterGroup], ranks: int, node: int | None, secondary: int | None) -> ZeroPlusPlus:
    primary = held = kept = count = 0
    for group in groups:
        gathered = group.gathered_bytes * ranks
        count += sum(p.whole for p in group.parameters)
        primary += sum(p.padded * p.parameter.dtype.itemsize for p in group.parameters)
        if not group.reshards:
            kept += gathered
        elif secondary is not None and secondary < ranks:
            held += gathered // secondary
    return ZeroPlusPlus(ranks, node, secondary, count, primary, held, kept)

"""Quantized collectives of tensors: differentiable, and single nodes for torch.compile.

Rounding is passed straight through: the gradient is that of the exact collective, in the conventions of
`rewriter.runtime.collectives`. What backward sends (reduce_scatter, all_to_all) is quantized as in forward.

    function                    forward                     gradient                      from → to
    quantized_all_reduce        sum over ranks              identity                      partial → replicated
    quantized_all_gather        concatenation               the rank's own slice          shard → replicated
    quantized_reduce_scatter    own slice of the sum        gathered                      partial → shard
    quantized_all_to_all        parts change ranks          they change back              shard → other shard

Each takes a tensor of any shape that has the named dimensions, contiguous or not, in bf16, fp16 or fp32, and a
ProcessGroup or DeviceMesh, or None for one rank; meshes, formats and stages are those of `quantized.launch`.
`name` says in errors and events which collective it is. All raise RewriterError for formats, dtypes, meshes, dimensions
and sizes that they cannot do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from rewriter.common.errors import RewriterError
from rewriter.kernels import Format
from rewriter.runtime.collective_log import observe
from rewriter.runtime.pending_all_reduce import Pending
from rewriter.runtime.quantized.launch import (
    MeshOrGroup,
    all_gather_start,
    all_reduce_start,
    all_to_all_start,
    called,
    checked_formats,
    reduce_scatter_start,
)
from rewriter.runtime.quantized.topology import Topology, by_key, topology_key, topology_of


def quantized_all_reduce(
    x: Tensor, mesh_or_group: MeshOrGroup, *, format: str | Format, stages: int = 1, name: str = ""
) -> Tensor:
    """The sum of the partial `x` over all ranks, equal bits on all of them; a new tensor of x's shape and dtype."""
    total: Tensor = _all_reduce(x, topology_key(mesh_or_group), str(format), stages, name)
    return total


def quantized_reduce_scatter(
    x: Tensor, mesh_or_group: MeshOrGroup, *, format: str | Format, dim: int = 0, name: str = ""
) -> Tensor:
    """This rank's shard of the sum of `x` over all ranks, along `dim`, as `torch.chunk` would cut it: where the size
    does not divide, the last ranks have less, or nothing. The own part of each sum is exact, and it is not quantized
    again."""
    _check_dims(x, "reduce_scatter", name, dim)
    own: Tensor = _reduce_scatter(x, topology_key(mesh_or_group), str(format), dim, name)
    return own


def quantized_all_gather(
    x: Tensor,
    mesh_or_group: MeshOrGroup,
    *,
    format: str | Format,
    dim: int = 0,
    size: int | None = None,
    name: str = "",
) -> Tensor:
    """The shards of all ranks along `dim`, in rank order and equal bits on all of them: the own shard, too, is what its
    payload says.

    size: of the whole, where shards are not equal but those of `torch.chunk`.
    """
    _check_dims(x, "all_gather", name, dim)
    whole: Tensor = _all_gather(x, topology_key(mesh_or_group), str(format), dim, size, name)
    return whole


def quantized_all_to_all(
    x: Tensor,
    mesh_or_group: MeshOrGroup,
    *,
    format: str | Format,
    split_dim: int = 0,
    concat_dim: int = 0,
    name: str = "",
) -> Tensor:
    """Part r of `x` along `split_dim`, whose size divides by the ranks, goes to rank r; the parts that arrive follow
    each other along `concat_dim` in rank order. The own part is not quantized."""
    _check_dims(x, "all_to_all", name, split_dim, concat_dim)
    exchanged: Tensor = _all_to_all(x, topology_key(mesh_or_group), str(format), split_dim, concat_dim, name)
    return exchanged


def _check_dims(x: Tensor, function: str, name: str, *dims: int) -> None:
    for dim in dims:
        if not -x.dim() <= dim < x.dim():
            raise RewriterError(f"{called(function, name)}: x {list(x.shape)} has no dimension {dim}")


def quantized_all_reduce_start(
    x: Tensor, mesh_or_group: MeshOrGroup, *, format: str | Format, stages: int = 1, name: str = ""
) -> Pending:
    """Begin `quantized_all_reduce`; `all_reduce_wait` gives the sum.

    Unlike the exact `all_reduce_start` it does not sum in place: x is kept, and must not be written, until the sum has
    been waited for. All messages of the collective go out meanwhile: on CUDA from its own stream, on CPU from its own
    thread, which quantizes and sums there and uses its own process groups. All ranks start their
    collectives in the same order. Not for compiled graphs: start and wait stand between them.
    """
    topology = topology_of(mesh_or_group)
    if topology.ranks == 1:
        return Pending(x, None, name, None)
    with record_function(f"rewriter::quantized_all_reduce_start {name}".rstrip()):
        observe("start", name, x, topology)
        work = all_reduce_start(x.detach(), topology, format, stages=stages, name=name)
    return Pending(x, work, name, topology)


# --- the operators ---


def _checked(function: str, x: Tensor, key: str, format: str, name: str) -> Topology:
    """The ranks. Raises RewriterError for dtypes and formats, while tracing too."""
    topology = by_key(key)
    checked_formats(function, x, topology, format, name)
    return topology


@torch.library.custom_op("rewriter::quantized_all_reduce", mutates_args=())
def _all_reduce(x: Tensor, key: str, format: str, stages: int, name: str) -> Tensor:
    topology = by_key(key)
    observe("start", name, x, topology)
    total: Tensor = all_reduce_start(x, topology, format, stages=stages, name=name, wait=True).wait()
    observe("wait", name, x, topology)
    return total


@_all_reduce.register_fake
def _(x: Tensor, key: str, format: str, stages: int, name: str) -> Tensor:
    _checked("all_reduce", x, key, format, name)
    return x.new_empty(x.shape)


_all_reduce.register_autograd(lambda ctx, gradient: (gradient, *(None,) * 4))


def _shard(size: int, topology: Topology) -> tuple[int, int, int]:
    """(rows of a full shard, first row, rows) of this rank's of `torch.chunk`'s shards of `size` rows."""
    full = -(-size // topology.ranks)
    first = min(topology.rank * full, size)
    return full, first, min(full, size - first)


@torch.library.custom_op("rewriter::quantized_reduce_scatter", mutates_args=())
def _reduce_scatter(x: Tensor, key: str, format: str, dim: int, name: str) -> Tensor:
    topology = by_key(key)
    x_first = x.movedim(dim, 0)
    full, _, rows = _shard(x_first.shape[0], topology)
    x_rows = _padded(x_first, topology.ranks * full)
    sent_PN = x_rows.reshape(topology.ranks, -1) if x_rows.numel() else x_rows.new_empty(topology.ranks, 0)
    own_N = reduce_scatter_start(sent_PN, topology, format, name=name, wait=True).wait()
    return own_N.view(full, *x_first.shape[1:])[:rows].movedim(0, dim).clone(memory_format=torch.contiguous_format)


def _padded(x: Tensor, rows: int) -> Tensor:
    """With zeros, up to `rows` rows."""
    missing = rows - x.shape[0]
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


@_reduce_scatter.register_fake
def _(x: Tensor, key: str, format: str, dim: int, name: str) -> Tensor:
    topology, shape = _checked("reduce_scatter", x, key, format, name), list(x.shape)
    shape[dim] = _shard(shape[dim], topology)[2]
    return x.new_empty(shape)


def _scatter_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.key, ctx.format, ctx.dim, ctx.name = inputs
    ctx.size = x.shape[ctx.dim]


def _scatter_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return _all_gather(gradient, ctx.key, ctx.format, ctx.dim, ctx.size, ctx.name), *(None,) * 4


_reduce_scatter.register_autograd(_scatter_gradient, setup_context=_scatter_context)


@torch.library.custom_op("rewriter::quantized_all_gather", mutates_args=())
def _all_gather(x: Tensor, key: str, format: str, dim: int, size: int | None, name: str) -> Tensor:
    topology = by_key(key)
    x_first = x.movedim(dim, 0)
    size = _whole(x_first.shape[0], size, topology, name)
    full, _, _ = _shard(size, topology)
    sent = _padded(x_first, full).reshape(-1)
    observe("all_gather", name, x, topology)
    whole_PN = all_gather_start(sent, topology, format, dtype=x.dtype, name=name, wait=True).wait()
    whole = whole_PN.view(topology.ranks * full, *x_first.shape[1:])[:size]
    return whole.movedim(0, dim).clone(memory_format=torch.contiguous_format)


def _whole(rows: int, size: int | None, topology: Topology, name: str) -> int:
    size = rows * topology.ranks if size is None else size
    _, _, expected = _shard(size, topology)
    if expected != rows:
        raise RewriterError(
            f"{called('all_gather', name)}: rank {topology.rank} has {rows}, expected {expected}, its shard of {size} "
            f"on {topology.ranks} ranks"
        )
    return size


@_all_gather.register_fake
def _(x: Tensor, key: str, format: str, dim: int, size: int | None, name: str) -> Tensor:
    topology, shape = _checked("all_gather", x, key, format, name), list(x.shape)
    shape[dim] = _whole(shape[dim], size, topology, name)
    return x.new_empty(shape)


def _gather_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.key, ctx.dim = inputs[1], inputs[3]


def _gather_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    _, first, rows = _shard(gradient.shape[ctx.dim], by_key(ctx.key))
    return gradient.narrow(ctx.dim, first, rows).contiguous(), *(None,) * 5


_all_gather.register_autograd(_gather_gradient, setup_context=_gather_context)


@torch.library.custom_op("rewriter::quantized_all_to_all", mutates_args=())
def _all_to_all(x: Tensor, key: str, format: str, split_dim: int, concat_dim: int, name: str) -> Tensor:
    topology = by_key(key)
    _check_parts(x, split_dim, topology.ranks, name)
    sent = torch.stack(x.tensor_split(topology.ranks, split_dim))
    arrived_PN = all_to_all_start(sent.flatten(1), topology, format, name=name, wait=True).wait()
    return torch.cat(arrived_PN.view(sent.shape).unbind(), concat_dim)


def _check_parts(x: Tensor, dim: int, ranks: int, name: str) -> None:
    if x.shape[dim] % ranks:
        raise RewriterError(
            f"{called('all_to_all', name)}: x {list(x.shape)}, whose dimension {dim} does not divide by {ranks} ranks"
        )


@_all_to_all.register_fake
def _(x: Tensor, key: str, format: str, split_dim: int, concat_dim: int, name: str) -> Tensor:
    ranks = _checked("all_to_all", x, key, format, name).ranks
    _check_parts(x, split_dim, ranks, name)
    shape = list(x.shape)
    shape[split_dim] //= ranks
    shape[concat_dim] *= ranks
    return x.new_empty(shape)


def _all_to_all_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.key, ctx.format, ctx.split_dim, ctx.concat_dim, ctx.name = inputs


def _all_to_all_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    back = _all_to_all(gradient, ctx.key, ctx.format, ctx.concat_dim, ctx.split_dim, ctx.name)
    return back, *(None,) * 5


_all_to_all.register_autograd(_all_to_all_gradient, setup_context=_all_to_all_context)

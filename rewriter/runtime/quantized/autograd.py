"""The quantized all-reduce of a tensor: differentiable, a single node for torch.compile, or started early.

Rounding is passed straight through: the gradient is that of the exact all-reduce, the identity (partial → replicated).
It takes a tensor of any shape, contiguous or not, in bf16, fp16 or fp32, and a ProcessGroup or DeviceMesh, or None for
one rank; meshes, formats and stages are those of `quantized.launch`. `name` says in errors and events which collective
it is. Raises RewriterError for formats, dtypes and meshes that it cannot do.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.profiler import record_function

from rewriter.kernels import Format
from rewriter.runtime.collective_log import observe
from rewriter.runtime.pending_all_reduce import Pending
from rewriter.runtime.quantized.launch import MeshOrGroup, all_reduce_start, checked_formats
from rewriter.runtime.quantized.topology import by_key, topology_key, topology_of


def quantized_all_reduce(
    x: Tensor, mesh_or_group: MeshOrGroup, *, format: str | Format, stages: int = 1, name: str = ""
) -> Tensor:
    """The sum of the partial `x` over all ranks, equal bits on all of them; a new tensor of x's shape and dtype."""
    total: Tensor = _all_reduce(x, topology_key(mesh_or_group), str(format), stages, name)
    return total


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


@torch.library.custom_op("rewriter::quantized_all_reduce", mutates_args=())
def _all_reduce(x: Tensor, key: str, format: str, stages: int, name: str) -> Tensor:
    topology = by_key(key)
    observe("start", name, x, topology)
    total: Tensor = all_reduce_start(x, topology, format, stages=stages, name=name, wait=True).wait()
    observe("wait", name, x, topology)
    return total


@_all_reduce.register_fake
def _(x: Tensor, key: str, format: str, stages: int, name: str) -> Tensor:
    checked_formats("all_reduce", x, by_key(key), format, name)  # while tracing, too
    return x.new_empty(x.shape)


_all_reduce.register_autograd(lambda ctx, gradient: (gradient, *(None,) * 4))

"""Quantized collectives of flat tensors, started now and waited for later, and the all-reduce of any tensor.

Those of flat tensors know nothing of autograd. Each gives a Transfer, whose `wait` gives the result. With `wait=True`
nothing is to be done meanwhile: this thread runs all of it, on the current stream. Otherwise all messages go out while
the caller computes; see `schedule_worker`.

P ranks of `topology`: a ProcessGroup, a mesh of one dimension, or of two (nodes, ranks of a node); an axis of one rank
sends nothing, and where there is one rank all is exact. Formats are names (`rewriter.kernels.formats`),
"INSIDE/BETWEEN" for two steps. bf16, fp16 and fp32; sums are fp32.

With `seed`, an int that all ranks give alike and that no two calls share, messages are dithered, so that the error has
the mean 0 over seeds and ranks; without, they are rounded to the nearest. What is given must not be written until the
result has been waited for. All ranks start and wait in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function

from rewriter.common.errors import RewriterError
from rewriter.kernels import DTYPES, Format, slice_length
from rewriter.runtime.collectives.exchange import Pending, Transfer
from rewriter.runtime.collectives.log import observe
from rewriter.runtime.quantized import schedule_worker, schedules
from rewriter.runtime.quantized.schedule_worker import Schedule
from rewriter.runtime.quantized.schedules import Chunk, StepFormats, chunks, step_formats
from rewriter.runtime.quantized.topology import Topology, background, by_key, topology_key, topology_of

MeshOrGroup = Topology | DeviceMesh | ProcessGroup | None


def reduce_scatter_start(
    x_PN: Tensor,
    topology: MeshOrGroup,
    formats: str | Format,
    *,
    seed: int | None = None,
    stages: int = 1,
    factor: float = 1.0,
    dtype: torch.dtype | None = None,
    name: str = "",
    wait: bool = False,
) -> Transfer:
    """y_N [N]: slice r of the sum of all ranks' x [P, N] (or flat) at rank r, times `factor`, in `dtype`
    (x's by default).

    Quantized once per step; one's own part of each sum is exact. Any N: blocks are padded inside. stages: parts of each
    slice that follow each other, the second step of one while the first of the next is on its way (ZeRO++, Alg. 2).

    Raises RewriterError for shapes that do not divide by P, other dtypes and formats, and meshes of more dimensions.
    """
    call = _call("reduce_scatter", x_PN, topology, formats, name, seed)
    x_PN = _rows(x_PN, "reduce_scatter", call)
    y_N = x_PN.new_empty(x_PN.shape[1], dtype=dtype)
    if call.topology.ranks == 1:
        return _there(y_N.copy_(x_PN[0].to(torch.float32) * factor))

    def schedule(part: slice, chunk: Chunk) -> Schedule:
        return schedules.reduce_scatter(x_PN[:, part], y_N[part], factor, chunk)

    return _start(schedule, 1, x_PN, y_N, call, stages, wait)


def all_gather_start(
    x_N: Tensor,
    topology: MeshOrGroup,
    format: str | Format,
    *,
    dtype: torch.dtype,
    out: Tensor | None = None,
    seed: int | None = None,
    stages: int = 1,
    name: str = "",
    wait: bool = False,
) -> Transfer:
    """x_PN [P, N] in `dtype`: what each rank's payload of its x [N] says, the own one's too, so that all
    ranks hold equal bits. In `out` [P, N] (or flat), of which x may be a part, where it is given.

    Quantized once: with two steps, payloads go between nodes first, in the second format, and are passed on inside the
    node as they are. Raises RewriterError as `reduce_scatter_start`.
    """
    call = _call("all_gather", x_N, topology, format, name, seed)
    x_N, ranks = x_N.reshape(-1), call.topology.ranks
    if out is None:
        out = x_N.new_empty(ranks, x_N.shape[0], dtype=dtype)
    x_PN = out.view(ranks, x_N.shape[0])
    if ranks == 1:
        x_PN[0].copy_(x_N)
        return _there(x_PN)

    def schedule(part: slice, chunk: Chunk) -> Schedule:
        return schedules.all_gather(x_N[part], x_PN[:, part], chunk)

    return _start(schedule, 1, x_N, x_PN, call, stages, wait)


def all_reduce_start(
    x: Tensor,
    topology: MeshOrGroup,
    formats: str | Format,
    *,
    seed: int | None = None,
    stages: int = 1,
    name: str = "",
    wait: bool = False,
) -> Transfer:
    """A new tensor, contiguous, of x's shape and dtype: the sum over ranks, equal bits on all of them.

    A reduce-scatter whose sums are quantized once more, in the last step's format, and gathered. x is padded with zeros
    to `slice_length(n, P, formats)` elements for each rank. Raises RewriterError as `reduce_scatter_start`.
    """
    call = _call("all_reduce", x, topology, formats, name, seed)
    ranks = call.topology.ranks
    if ranks == 1 or x.numel() == 0:
        return _there(x.clone(memory_format=torch.contiguous_format))
    size = slice_length(x.numel(), ranks, formats)
    x_PN = x.reshape(-1)
    padding = ranks * size - x.numel()
    if padding:
        x_PN = torch.nn.functional.pad(x_PN, (0, padding))
    x_PN = x_PN.view(ranks, size)
    y_PN = torch.empty_like(x_PN)

    def schedule(part: slice, chunk: Chunk) -> Schedule:
        return schedules.all_reduce(x_PN[:, part], y_PN[:, part], chunk)

    transfer = _start(schedule, 2, x_PN, y_PN, call, stages, wait)
    return Transfer([transfer], lambda: y_PN.view(-1)[: x.numel()].view(x.shape))


def called(function: str, name: str) -> str:
    """What errors call the collective."""
    return f"quantized_{function} {name}".rstrip()


def checked_formats(function: str, x: Tensor, topology: Topology, formats: str | Format, name: str) -> StepFormats:
    """Raises RewriterError for dtypes that cannot be quantized, and for formats."""
    what = called(function, name)
    if x.dtype not in DTYPES:
        raise RewriterError(f"{what}: x is {x.dtype}, expected bfloat16, float16 or float32")
    return step_formats(formats, topology, what)


def _call(
    function: str, x: Tensor, mesh_or_group: MeshOrGroup, formats: str | Format, name: str, seed: int | None = None
) -> Chunk:
    """The first chunk, as which a collective is described before it is cut."""
    topology = topology_of(mesh_or_group)
    return Chunk(topology, checked_formats(function, x, topology, formats, name), name, seed)


def _rows(x: Tensor, function: str, call: Chunk) -> Tensor:
    ranks = call.topology.ranks
    if x.dim() == 2 and x.shape[0] == ranks and (x.shape[1] < 2 or x.stride(1) == 1):
        return x
    if x.numel() % ranks:
        what = called(function, call.name)
        raise RewriterError(f"{what}: {list(x.shape)}, {x.numel()} elements do not divide by {ranks} ranks")
    return x.reshape(ranks, x.numel() // ranks)


def _there(result: Tensor) -> Transfer:
    return Transfer([], lambda: result)


def _start(
    schedule: Callable[[slice, Chunk], Schedule],
    messages: int,
    x: Tensor,
    result: Tensor,
    call: Chunk,
    stages: int,
    wait: bool,
) -> Transfer:
    """`schedule` makes that of a part of the last dimension of x; it sends `messages` on each axis."""
    if stages < 1:
        raise RewriterError(f"quantized collectives: stages={stages}, expected at least 1")
    parts = chunks(x.shape[-1], stages, call.formats.block)

    def made(where: Topology) -> list[Schedule]:
        return [schedule(part, replace(call, topology=where, index=i)) for i, part in enumerate(parts)]

    where = call.topology
    if wait or not parts:
        return _there(schedule_worker.run(made(where), result))
    if len(parts) == 1 and messages * where.steps == 1:
        return schedule_worker.start_one(made(where)[0], result, [x])
    return schedule_worker.start(made(where if x.is_cuda else background(where)), result, [x])


# --- tensors of any shape, with gradients ---


def quantized_all_reduce(
    x: Tensor, mesh_or_group: MeshOrGroup, *, format: str | Format, stages: int = 1, name: str = ""
) -> Tensor:
    """The sum of the partial `x` over all ranks, equal bits on all of them; a new tensor of x's shape and dtype.

    Rounding is passed straight through: the gradient is that of the exact all-reduce, the identity (partial →
    replicated). A single node for torch.compile. `name` says in errors and events which collective it is. Raises
    RewriterError for formats, dtypes and meshes that it cannot do.
    """
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

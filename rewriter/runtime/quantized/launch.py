"""Quantized collectives of flat tensors, and the all-reduce of any tensor with its gradient.

P ranks of `topology`: a ProcessGroup, a mesh of one dimension, or of two (nodes, ranks of a node); an axis of one rank
sends nothing, and where there is one rank all is exact. Formats are names (`rewriter.kernels.formats`),
"INSIDE/BETWEEN" for two steps. bf16, fp16 and fp32; sums are fp32.

With `seed`, an int that all ranks give and that no two calls share, messages are dithered, so that the error has the
mean 0 over seeds and ranks; without, they are rounded to the nearest. All ranks start and wait in the same order. After
an error between messages every later call is refused: ranks are out of step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function

from rewriter.common.errors import RewriterError
from rewriter.kernels import DTYPES, Format, slice_length
from rewriter.runtime.collectives.exchange import Pending, Transfer, messages_under_way
from rewriter.runtime.collectives.log import observe
from rewriter.runtime.quantized import background, schedules
from rewriter.runtime.quantized.schedules import QuantizedCall, Schedule, StepFormats, step_formats
from rewriter.runtime.quantized.topology import Topology, by_key, topology_key, topology_of

MeshOrGroup = Topology | DeviceMesh | ProcessGroup | None


# --- flat tensors, without autograd ---


def reduce_scatter(
    x_PN: Tensor,
    topology: MeshOrGroup,
    formats: str | Format,
    *,
    seed: int | None = None,
    factor: float = 1.0,
    dtype: torch.dtype | None = None,
    name: str = "",
) -> Tensor:
    """y_N [N]: slice r of the sum of all ranks' x [P, N] (or flat) at rank r, times `factor`, in `dtype`
    (x's by default).

    Quantized once per step; one's own part of each sum is exact. Any N: blocks are padded inside. Raises RewriterError
    for shapes that do not divide by P, other dtypes and formats, and meshes of more dimensions.
    """
    call = _call("reduce_scatter", x_PN, topology, formats, name, seed)
    x_PN = _rows(x_PN, "reduce_scatter", call)
    y_N = x_PN.new_empty(x_PN.shape[1], dtype=dtype)
    if call.topology.ranks == 1:
        return y_N.copy_(x_PN[0].to(torch.float32) * factor)
    if y_N.numel():
        _run(schedules.reduce_scatter(x_PN, y_N, factor, call))
    return y_N


def all_gather(
    x_N: Tensor,
    topology: MeshOrGroup,
    format: str | Format,
    *,
    dtype: torch.dtype,
    out: Tensor | None = None,
    seed: int | None = None,
    name: str = "",
) -> Tensor:
    """x_PN [P, N] in `dtype`: what each rank's payload of its x [N] says, the own one's too, so that all
    ranks hold equal bits. In `out` [P, N] (or flat), of which x may be a part, where it is given.

    Quantized once: with two steps, payloads go between nodes first, in the second format, and are passed on inside the
    node as they are. Raises RewriterError as `reduce_scatter`.
    """
    call = _call("all_gather", x_N, topology, format, name, seed)
    x_N, ranks = x_N.reshape(-1), call.topology.ranks
    if out is None:
        out = x_N.new_empty(ranks, x_N.shape[0], dtype=dtype)
    x_PN = out.view(ranks, x_N.shape[0])
    if ranks == 1:
        x_PN[0].copy_(x_N)
    elif x_N.numel():
        _run(schedules.all_gather(x_N, x_PN, call))
    return x_PN


def all_reduce_start(
    x: Tensor,
    topology: MeshOrGroup,
    formats: str | Format,
    *,
    seed: int | None = None,
    name: str = "",
    wait: bool = False,
) -> Transfer:
    """A transfer whose `wait` gives a new tensor, contiguous, of x's shape and dtype: the sum over ranks, equal bits on
    all of them. x must not be written until then.

    A reduce-scatter whose sums are quantized once more, in the last step's format, and gathered. x is padded with zeros
    to `slice_length(n, P, formats)` elements for each rank. Until the wait it runs on another stream on CUDA, in
    another thread on a CPU; with `wait=True` it is done at once, here.
    Raises RewriterError as `reduce_scatter`.
    """
    call = _call("all_reduce", x, topology, formats, name, seed)
    ranks = call.topology.ranks
    if ranks == 1 or x.numel() == 0:
        there = x.clone(memory_format=torch.contiguous_format)
        return Transfer([], lambda: there)
    size = slice_length(x.numel(), ranks, formats)
    x_PN = x.reshape(-1)
    if padding := ranks * size - x.numel():
        x_PN = torch.nn.functional.pad(x_PN, (0, padding))
    x_PN = x_PN.view(ranks, size)
    y_PN = torch.empty_like(x_PN)

    def result() -> Tensor:
        return y_PN.view(-1)[: x.numel()].view(x.shape)

    if wait:
        _run(schedules.all_reduce(x_PN, y_PN, call))
        return Transfer([], result)
    if x.is_cuda:
        return Transfer([_started_on_stream(schedules.all_reduce(x_PN, y_PN, call), x.device)], result, (x_PN,))
    call = replace(call, topology=background.own_groups(call.topology))
    schedule = schedules.all_reduce(x_PN, y_PN, call)
    return Transfer([background.start(lambda: _run(schedule))], result, (x_PN,))


@contextmanager
def _messages() -> Iterator[None]:
    with messages_under_way("quantized collectives"), torch.no_grad():
        yield


def _run(schedule: Schedule) -> None:
    """Run the rest of `schedule`, waiting for each message."""
    with _messages():
        for transfer in schedule:
            transfer.wait()


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _started_on_stream(schedule: Schedule, device: torch.device) -> torch.cuda.Event:
    """All of `schedule` enqueued on another stream, and its end. What it reads and writes belongs to the caller's
    stream, and is held until that waits for this one: what is freed afterwards is used again after that."""
    with torch.cuda.device(device):
        if device not in _streams:
            _streams[device] = torch.cuda.Stream()
        stream = _streams[device]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            _run(schedule)
        return stream.record_event()


def checked_formats(
    function: str, x: Tensor, topology: Topology, formats: str | Format, name: str, *, dithered: bool = False
) -> StepFormats:
    """Raises RewriterError for dtypes that cannot be quantized, and for formats."""
    what = f"quantized_{function} {name}".rstrip()
    if x.dtype not in DTYPES:
        raise RewriterError(f"{what}: x is {x.dtype}, expected bfloat16, float16 or float32")
    return step_formats(formats, topology, what, dithered=dithered)


def _call(
    function: str, x: Tensor, mesh_or_group: MeshOrGroup, formats: str | Format, name: str, seed: int | None = None
) -> QuantizedCall:
    topology = topology_of(mesh_or_group)
    checked = checked_formats(function, x, topology, formats, name, dithered=seed is not None)
    return QuantizedCall(topology, checked, name, seed)


def _rows(x: Tensor, function: str, call: QuantizedCall) -> Tensor:
    ranks = call.topology.ranks
    if x.dim() == 2 and x.shape[0] == ranks and (x.shape[1] < 2 or x.stride(1) == 1):
        return x
    if x.numel() % ranks:
        what = f"quantized_{function} {call.name}".rstrip()
        raise RewriterError(f"{what}: {list(x.shape)}, {x.numel()} elements do not divide by {ranks} ranks")
    return x.reshape(ranks, x.numel() // ranks)


# --- tensors of any shape, with gradients ---


def quantized_all_reduce(x: Tensor, mesh_or_group: MeshOrGroup, *, format: str | Format, name: str = "") -> Tensor:
    """The sum of the partial `x` over all ranks, equal bits on all of them; a new tensor of x's shape and dtype.

    Rounding is passed straight through: the gradient is that of the exact all-reduce, the identity (partial →
    replicated). A single node for torch.compile. `name` says in errors and events which collective it is. Raises
    RewriterError for formats, dtypes and meshes that it cannot do.
    """
    total: Tensor = _all_reduce(x, topology_key(mesh_or_group), str(format), name)
    return total


def quantized_all_reduce_start(
    x: Tensor, mesh_or_group: MeshOrGroup, *, format: str | Format, name: str = ""
) -> Pending:
    """Begin `quantized_all_reduce`; `all_reduce_wait` gives the sum.

    Unlike the exact `all_reduce_start` it does not sum in place: x is kept, and must not be written, until the sum has
    been waited for. Meanwhile all messages of the collective go out, from another stream on CUDA and from another
    thread, with its own process groups, on a CPU. All ranks start their collectives in the same order. Not for
    compiled graphs: start and wait stand between them.
    """
    topology = topology_of(mesh_or_group)
    if topology.ranks == 1:
        return Pending(x, None, name, None)
    with record_function(f"rewriter::quantized_all_reduce_start {name}".rstrip()):
        observe("start", name, x, topology)
        work = all_reduce_start(x.detach(), topology, format, name=name)
    return Pending(x, work, name, topology)


@torch.library.custom_op("rewriter::quantized_all_reduce", mutates_args=())
def _all_reduce(x: Tensor, key: str, format: str, name: str) -> Tensor:
    topology = by_key(key)
    observe("start", name, x, topology)
    total: Tensor = all_reduce_start(x, topology, format, name=name, wait=True).wait()
    observe("wait", name, x, topology)
    return total


@_all_reduce.register_fake
def _(x: Tensor, key: str, format: str, name: str) -> Tensor:
    checked_formats("all_reduce", x, by_key(key), format, name)  # while tracing, too
    return x.new_empty(x.shape)


_all_reduce.register_autograd(lambda ctx, gradient: (gradient, *(None,) * 3))

"""Streams of a GPU: steps captured as CUDA graphs, and a block that runs at the same time as the next one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rewriter.runtime.collectives.log import is_recording

_WARM_UPS = 3
_CAPTURED = ("nccl", "emulated")  # backends whose collectives are kernels on streams


def host_waits(x: Tensor) -> bool:
    """True if the host, to read values of tensors like `x`, waits for what is computed before."""
    return x.is_cuda


def why_not_captured(group: ProcessGroup | None) -> str | None:
    """Reason why steps of such ranks cannot be captured; None where they can be."""
    if is_recording():
        return "events of collectives are recorded"
    if group is None or group.size() == 1:
        return None
    if os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0") not in ("", "0"):
        return "TORCH_NCCL_BLOCKING_WAIT is set, so that the host waits for every collective"
    if not any(able in (backend := dist.get_backend(group)) for able in _CAPTURED):
        return f"a CUDA graph holds no collectives of {backend}"
    return None


def capture(
    steps: Sequence[Callable[[], None]], state: Sequence[Tensor], random: torch.Generator, group: ProcessGroup | None
) -> list[Callable[[], None]] | str:
    """Each of `steps` as a graph that replays it on the current stream, or why a rank of `group` could not capture one.

    All ranks of `group` call it together. `steps` run a few times, one after the other, and what they change, the
    tensors `state` and the generator `random`, is then as before.
    """
    device = state[0].device
    saved, drawn = [x.clone() for x in state], random.get_state()

    def warm_up() -> None:
        for step in steps:
            step()
        for x, before in zip(state, saved, strict=True):
            x.copy_(before)

    stream = _warmed_up(warm_up, device)
    random.set_state(drawn)
    graphs, failure = [], None
    try:
        graphs = [_captured(step, stream, random) for step in steps]
    except RuntimeError as error:  # torch's of CUDA are, too
        failure = str(error).partition("\n")[0]
    if not _all_agree(failure is None, device, group):
        return f"capturing failed ({failure or 'on another rank'})"
    return [graph.replay for graph in graphs]


def replay_of(step: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """`step` as a graph that replays it on the current stream. Raises what capturing raises."""
    replay: Callable[[], None] = _captured(step, _warmed_up(step, device)).replay
    return replay


def _warmed_up(run: Callable[[], object], device: torch.device) -> torch.cuda.Stream:
    """The stream on which `run` has run a few times. It captures next: cuBLAS has a workspace for each stream."""
    stream, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            run()
    current.wait_stream(stream)
    return stream


def _captured(
    step: Callable[[], object], stream: torch.cuda.Stream, random: torch.Generator | None = None
) -> torch.cuda.CUDAGraph:
    """NCCL's watchdog, another thread, may ask for events meanwhile."""
    graph = torch.cuda.CUDAGraph()
    if random is not None:
        graph.register_generator_state(random)
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()
    return graph


def _all_agree(yes: bool, device: torch.device, group: ProcessGroup | None) -> bool:
    if group is None or group.size() == 1:
        return yes
    votes = torch.tensor([int(yes)], device=device)
    dist.all_reduce(votes, dist.ReduceOp.MIN, group=group)
    return bool(votes.item())


class Branch:
    """Result of `fork`: a context in which kernels are launched on another stream, and `join`."""

    def __init__(self, side: torch.cuda.Stream | None, read: tuple[Tensor, ...]) -> None:
        self._side, self._read = side, read
        self._on: AbstractContextManager[object] = nullcontext() if side is None else torch.cuda.stream(side)

    def __enter__(self) -> Branch:
        self._on.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._on.__exit__(*error)

    def join(self) -> None:
        """The current stream waits for the branch; the host does not. What the branch read may be freed from now on."""
        if self._side is not None:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)
        self._read = ()


def fork(*read: Tensor) -> Branch:
    """A branch that reads the tensors `read`, and begins when what was launched before is done.

    The branch keeps `read` until it is joined: the allocator would hand their memory to the other stream. What the
    branch makes may be read after `join` only. With gradients, whose order autograd chooses, and on a CPU there is one
    stream.
    """
    if not on_streams(read[0]):
        return Branch(None, ())
    side = _side_stream(read[0].device)
    side.wait_stream(torch.cuda.current_stream(read[0].device))
    return Branch(side, read)


def on_streams(x: Tensor) -> bool:
    """True if a branch that reads `x` has another stream."""
    return x.is_cuda and not torch.is_grad_enabled()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)

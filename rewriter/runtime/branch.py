"""A block that runs on a stream of its own beside the next one. On a CPU it runs where it is printed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import TracebackType

import torch
from torch import Tensor


class Branch:
    """What `fork` returns: a context in which kernels are launched on another stream, and `join`."""

    def __init__(self, side: torch.cuda.Stream | None, read: tuple[Tensor, ...]) -> None:
        self._side, self._read = side, read
        self._on: AbstractContextManager[object] = nullcontext() if side is None else torch.cuda.stream(side)

    def __enter__(self) -> Branch:
        self._on.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._on.__exit__(kind, error, trace)

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
    """Whether a branch beside computation with `x` has a stream of its own."""
    return x.is_cuda and not torch.is_grad_enabled()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)

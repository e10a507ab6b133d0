"""Gradients summed over ranks in buckets, while backward is still computing earlier layers.

A bucket is one flat tensor: gradients of some parameters, then for each the number of ranks that have one. It is
all-reduced in one collective, of which each rank takes the pieces that it owns (multi-rank bucketing; DeepSpeed's
communication post, section 2).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from rewriter.common.errors import RewriterError
from rewriter.runtime.collectives.log import observe
from rewriter.training.zero.flat import FlatParameter, accumulate_gradient

BUCKET_BYTES = 64 << 20
IN_FLIGHT = 2  # buckets whose memory exists at a time, besides the one that fills, where it is freed


class Bucket:
    """Gradients of `parameters`, which are of one dtype and device, in fp32 or the parameters' wider dtype."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: ProcessGroup | None, name: str) -> None:
        self.parameters, self.group, self.name = parameters, group, name
        self.dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        bounds = list(accumulate((p.numel() for p in parameters), initial=0))
        self.places = [slice(*ends) for ends in pairwise(bounds)]
        self.size = bounds[-1] + len(parameters)
        self.buffer: Tensor | None = None
        self.filled: set[int] = set()
        self.work: Any = None

    def add(self, index: int, gradient: Tensor) -> None:
        """Add to the gradient of a parameter."""
        place = self._memory()[self.places[index]]
        if index in self.filled:
            place += gradient.reshape(-1)
        else:
            place.copy_(gradient.reshape(-1))
        self.filled.add(index)

    def start(self) -> None:
        """Begin to sum over the group. Parameters without a gradient on this rank count as zeros."""
        buffer = self._memory()
        flags = buffer[-len(self.parameters) :].fill_(1)
        for i in set(range(len(self.parameters))) - self.filled:
            buffer[self.places[i]] = 0
            flags[i] = 0
        if self.group is not None and self.group.size() > 1:
            observe("start", self.name, buffer, self.group)
            self.work = dist.all_reduce(buffer, group=self.group, async_op=True)

    def finish(self) -> list[Tensor | None]:
        """The sums, each flat; None for a parameter that has no gradient on any rank."""
        self.wait()
        buffer = self._memory()
        sums = [buffer[place] if used else None for place, used in zip(self.places, self._used(), strict=True)]
        self.filled.clear()
        return sums

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None

    def _used(self) -> list[bool]:
        if len(self.filled) == len(self.parameters):  # else the host waits for the numbers of ranks
            return [True] * len(self.parameters)
        return [ranks > 0 for ranks in self._memory()[-len(self.parameters) :].tolist()]

    def _memory(self) -> Tensor:
        if self.buffer is None:
            self.buffer = torch.empty(self.size, dtype=self.dtype, device=self.parameters[0].device)
        return self.buffer


def bucketed(parameters: Sequence[nn.Parameter], nbytes: int) -> list[list[int]]:
    """Indices of parameters in reverse order, in buckets of at most `nbytes` of gradients (fp32, or wider where
    parameters are), or of one parameter; each bucket of one dtype and device."""
    made: list[list[int]] = []
    kind, size = None, 0
    for i in reversed(range(len(parameters))):
        dtype = torch.promote_types(parameters[i].dtype, torch.float32)
        needed = parameters[i].numel() * dtype.itemsize
        if kind != (dtype, parameters[i].device) or size + needed > nbytes:
            made.append([])
            kind, size = (dtype, parameters[i].device), 0
        made[-1].append(i)
        size += needed
    return made


class Reducer:
    """Fills buckets as backward gives gradients, and sums each as soon as it and those before it are complete.

    All ranks reduce all buckets in one order, also where parameters took no part; each adds its pieces, divided by
    `divide`, to the gradients of its master weights. `keep`: buckets stay in memory, so that several backward passes
    may fill them before they are reduced (`sync` False).
    """

    def __init__(
        self, parameters: Sequence[FlatParameter], group: ProcessGroup | None, nbytes: int, divide: float, keep: bool
    ) -> None:
        self.divide, self.keep = divide, keep
        self.held = [[parameters[i] for i in each] for each in bucketed([h.parameter for h in parameters], nbytes)]
        self.buckets = [
            Bucket([h.parameter for h in each], group, f"gradients {n}") for n, each in enumerate(self.held)
        ]
        self.sync = True
        self.pending = False  # buckets hold what was not reduced
        self._active = False
        self._next = 0
        self._missing: list[set[int]] = []
        self._flying: deque[int] = deque()
        for b, each in enumerate(self.held):
            for i, held in enumerate(each):
                held.parameter.register_post_accumulate_grad_hook(partial(self._take, b, i))

    @torch.no_grad()
    def _take(self, b: int, i: int, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if gradient.is_sparse:
            raise RewriterError(
                f"zero_optimizer: {self.held[b][i].name} has a sparse gradient, which does not fit a flat buffer. "
                "Build the embedding with sparse=False"
            )
        if not self._active:
            self._active, self._next, self.pending = True, 0, True
            self._missing = [set(range(len(each))) for each in self.held]
            # when all gradients are computed, as FSDP2 does it: autograd has no public way
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        if b < self._next:
            raise RewriterError(
                f"zero_optimizer: {self.held[b][i].name} got a second gradient in one backward pass, after its "
                "bucket was sent. Checkpoint activations with use_reentrant=False"
            )
        self.buckets[b].add(i, gradient)
        self._missing[b].discard(i)
        if self.sync or not self.keep:
            while self._next < len(self.buckets) and not self._missing[self._next]:
                self._launch()

    def _launch(self) -> None:
        self.buckets[self._next].start()
        self._flying.append(self._next)
        self._next += 1
        while not self.keep and len(self._flying) > IN_FLIGHT:
            self._land()

    def _land(self) -> None:
        b = self._flying.popleft()
        bucket = self.buckets[b]
        sums = bucket.finish()
        observe("wait", bucket.name, bucket.parameters[0], bucket.group)
        for held, total in zip(self.held[b], sums, strict=True):
            if total is not None and held.mine is not None:
                accumulate_gradient(held.master, held.gradient, total[held.mine.source].div_(self.divide))
        if not self.keep:
            bucket.buffer = None

    @torch.no_grad()
    def _end(self) -> None:
        self._active = False
        if self.sync or not self.keep:
            self._reduce_rest()

    def _reduce_rest(self) -> None:
        while self._next < len(self.buckets):
            self._launch()
        while self._flying:
            self._land()
        self.pending = False

    @torch.no_grad()
    def finish(self) -> None:
        """Reduce the gradients that backward passes under `no_sync` left."""
        if self.pending:
            self._next = 0
            self._reduce_rest()

    def clear(self) -> None:
        """Forget gradients that were not reduced, also of a backward pass that an error ended."""
        self._flying.clear()
        for bucket in self.buckets:
            bucket.wait()
            bucket.filled.clear()
        self._active = self.pending = False

"""Gradients on their way to the ranks that own them: in buckets, while backward is still computing earlier layers.

A bucket is one flat tensor with a section for each owner: the elements of the pieces that it owns, then for each piece
a number that says on how many ranks it got a gradient. Multi-rank bucketing (DeepSpeed's communication post, section 2)
all-reduces the whole tensor in one collective, of which each owner takes its section; the alternative is one reduce
for each section.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from rewriter.common.errors import RewriterError
from rewriter.runtime.collectives.log import observe
from rewriter.runtime.collectives.process_groups import group_rank
from rewriter.training.zero.flat import FlatParameter

BUCKET_BYTES = 64 << 20
IN_FLIGHT = 2  # buckets whose memory exists at a time, besides the one that fills, where it is freed


@dataclass(frozen=True)
class Section:
    """Elements `begin` to `flags` of a bucket hold gradients, `flags` to `end` the numbers of ranks."""

    owner: int
    begin: int
    flags: int
    end: int
    parameters: list[int]  # one piece of each


class Bucket:
    """Gradients of `parameters`, whole ones, in `dtype`."""

    def __init__(self, parameters: list[FlatParameter], group: ProcessGroup | None, name: str) -> None:
        self.parameters, self.group, self.name = parameters, group, name
        self.dtype = torch.promote_types(parameters[0].parameter.dtype, torch.float32)
        self.places: list[list[tuple[slice, slice]]] = [[] for _ in parameters]  # in the bucket, in the parameter
        self.sections: list[Section] = []
        self.size = 0
        pieces = [(piece, i) for i, held in enumerate(parameters) for piece in held.pieces]
        for owner in sorted({piece.owner for piece, _ in pieces}):
            begin, held = self.size, []
            for piece, i in pieces:
                if piece.owner == owner:
                    place = slice(self.size, self.size + piece.end - piece.start)
                    self.places[i].append((place, piece.source))
                    self.size = place.stop
                    held.append(i)
            self.sections.append(Section(owner, begin, self.size, self.size + len(held), held))
            self.size += len(held)
        self.buffer: Tensor | None = None
        self.filled: set[int] = set()

    def add(self, index: int, gradient: Tensor) -> None:
        if self.buffer is None:
            self.buffer = torch.empty(self.size, dtype=self.dtype, device=gradient.device)
        flat = gradient.reshape(-1)
        for place, source in self.places[index]:
            if index in self.filled:
                self.buffer[place] += flat[source]
            else:
                self.buffer[place] = flat[source]
        self.filled.add(index)

    def start(self, per_owner: bool) -> list[Any]:
        """Begin to sum over the group. Parameters without a gradient on this rank count as zeros."""
        if self.buffer is None:
            self.buffer = torch.empty(self.size, dtype=self.dtype, device=self.parameters[0].parameter.device)
        for section in self.sections:
            self.buffer[section.flags : section.end] = 1
            for at, i in enumerate(section.parameters, section.flags):
                if i not in self.filled:
                    self.buffer[at] = 0
        for i in set(range(len(self.parameters))) - self.filled:
            for place, _ in self.places[i]:
                self.buffer[place] = 0
        if self.group is None or self.group.size() == 1:
            return []
        if not per_owner:
            observe("start", self.name, self.buffer, self.group)
            return [dist.all_reduce(self.buffer, group=self.group, async_op=True)]
        members = dist.get_process_group_ranks(self.group)
        works = []
        for section in self.sections:
            part = self.buffer[section.begin : section.end]
            observe("reduce", f"{self.name} to {section.owner}", part, self.group)
            works.append(dist.reduce(part, members[section.owner], group=self.group, async_op=True))
        return works

    def take(self, divide: float, keep: bool) -> None:
        """Add the own section to the gradients of this rank's master weights, and forget the rest."""
        assert self.buffer is not None
        rank = group_rank(self.group)
        for section in self.sections:
            if section.owner != rank:
                continue
            complete = self.filled.issuperset(section.parameters)  # else the host waits for the numbers of ranks
            used = [True] * len(section.parameters) if complete else self._used(section)
            for i, is_used in zip(section.parameters, used, strict=True):
                held = self.parameters[i]
                if is_used and held.mine is not None:
                    place, _ = self.places[i][held.pieces.index(held.mine)]
                    held.accumulate(self.buffer[place].div_(divide))
        self.filled.clear()
        if not keep:
            self.buffer = None

    def _used(self, section: Section) -> list[bool]:
        assert self.buffer is not None
        return [ranks > 0 for ranks in self.buffer[section.flags : section.end].tolist()]


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


def buckets_of(parameters: Sequence[FlatParameter], group: ProcessGroup | None, bucket_bytes: int) -> list[Bucket]:
    """Parameters in reverse order, in buckets of at most `bucket_bytes` of gradients each, or of one parameter."""
    made = bucketed([held.parameter for held in parameters], bucket_bytes)
    return [Bucket([parameters[i] for i in each], group, f"gradients {n}") for n, each in enumerate(made)]


class Reducer:
    """Fills buckets as backward gives gradients, and sums each as soon as it and those before it are complete.

    All ranks reduce all buckets in one order, also where parameters took no part. `keep`: buckets stay in memory, so
    that several backward passes may fill them before they are reduced (`sync` False).
    """

    def __init__(self, buckets: list[Bucket], *, divide: float, per_owner: bool, keep: bool) -> None:
        self.buckets, self.divide, self.per_owner, self.keep = buckets, divide, per_owner, keep
        self.sync = True
        self.pending = False  # buckets hold what was not reduced
        self._active = False
        self._next = 0
        self._missing: list[set[int]] = []
        self._flying: deque[tuple[Bucket, list[Any]]] = deque()
        for b, bucket in enumerate(buckets):
            for i, held in enumerate(bucket.parameters):
                held.parameter.register_post_accumulate_grad_hook(partial(self._take, b, i))

    @torch.no_grad()
    def _take(self, b: int, i: int, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        bucket = self.buckets[b]
        if gradient.is_sparse:
            raise RewriterError(
                f"zero_optimizer: {bucket.parameters[i].name} has a sparse gradient, which does not fit a flat buffer. "
                "Build the embedding with sparse=False"
            )
        if not self._active:
            self._active, self._next, self.pending = True, 0, True
            self._missing = [set(range(len(each.parameters))) for each in self.buckets]
            _after_backward(self._end)
        if b < self._next:
            raise RewriterError(
                f"zero_optimizer: {bucket.parameters[i].name} got a second gradient in one backward pass, after its "
                "bucket was sent. Checkpoint activations with use_reentrant=False"
            )
        bucket.add(i, gradient)
        self._missing[b].discard(i)
        if self.sync or not self.keep:
            while self._next < len(self.buckets) and not self._missing[self._next]:
                self._launch()

    def _launch(self) -> None:
        bucket = self.buckets[self._next]
        self._next += 1
        self._flying.append((bucket, bucket.start(self.per_owner)))
        while not self.keep and len(self._flying) > IN_FLIGHT:
            self._land()

    def _land(self) -> None:
        bucket, works = self._flying.popleft()
        for work in works:
            work.wait()
        observe("wait", bucket.name, bucket.parameters[0].parameter, bucket.group)
        bucket.take(self.divide, self.keep)

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
        """Reduce what backward passes under `no_sync` left."""
        if self.pending:
            self._next = 0
            self._reduce_rest()

    def clear(self) -> None:
        """Forget what was not reduced, also of a backward pass that an error ended."""
        for _, works in self._flying:
            for work in works:
                work.wait()
        self._flying.clear()
        for bucket in self.buckets:
            bucket.filled.clear()
        self._active = self.pending = False


def _after_backward(function: Callable[[], None]) -> None:
    """Call `function` once, when the backward pass that is running has computed all its gradients. What FSDP2 uses:
    autograd has no public way to say it."""
    torch.autograd.Variable._execution_engine.queue_callback(function)

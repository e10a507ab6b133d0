"""Collectives with the gradients that tensor parallelism needs.

torch's registered gradient of an all-reduce is an all-reduce, which multiplies gradients by the number of ranks when
every rank computes the same loss. Here a value is either *replicated* (equal on all ranks, its gradient too) or
*partial* (its sum over ranks is the value), and each function below moves between the two:

    function                forward                     gradient                      from → to
    all_reduce              sum over ranks              identity                      partial → replicated
    all_reduce_start/wait   the same, in two steps      identity                      partial → replicated
    copy_to_group           identity                    sum over ranks                replicated → rank-local
    agreed                  identity                    the gradient / ranks          rank-local, equal → replicated
    all_gather              concatenation               the rank's own slice          shard → replicated
    once                    the value on rank 0 only    identity                      replicated → partial
    share                   the value / ranks           mean over ranks               replicated → partial, used alone
    shared_gradient         identity                    sum over every copy           overlapping shards → rank-local

`quantized_…` are those of `rewriter.runtime.quantized.launch`, whose messages are of a few bits per element.

`group` is a ProcessGroup; None or a group of one rank makes each of them the identity. Gloo on CPU and NCCL on CUDA
run the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rewriter.runtime.collectives.exchange import Pending, all_gather_flat, all_reduce_wait
from rewriter.runtime.collectives.gradients import copy_to_group, identity, with_gradient
from rewriter.runtime.collectives.log import annotated, observe
from rewriter.runtime.collectives.process_groups import group_rank, group_size
from rewriter.runtime.collectives.small_sums import small_gather, small_sum_start
from rewriter.runtime.quantized.launch import quantized_all_reduce, quantized_all_reduce_start

# --- all-reduce ---


def all_reduce_start(
    x: Tensor, group: ProcessGroup | None, name: str = "", *, format: str | None = None, min_bytes: int = 0
) -> Pending:
    """Begin the sum of `x` over `group`, in place on `x`'s memory; the caller must not read or write `x` afterwards.

    Any shape and floating dtype (bf16 included, on gloo and NCCL). Only a non-contiguous `x` is copied first.
    Together with `all_reduce_wait` it has all_reduce's autograd: the value changes under an unchanged history,
    because the gradient of the sum with respect to this rank's partial is the identity. If the operation that
    produced `x` saved its output for its own backward (exp, softmax, tanh), backward raises torch's "modified by an
    inplace operation" instead of using the sum.

    With a `format`, an `x` of `min_bytes` bytes or more travels quantized (see `quantized_all_reduce_start`, which does
    not work in place): all ranks decide the same, by shape and dtype.
    """
    if format is not None and x.nbytes >= min_bytes:
        return quantized_all_reduce_start(x, group, format=format, name=name)
    if group is None or group.size() == 1:
        return Pending(x, None, name, None)
    with annotated("all_reduce_start", name):
        x = x.contiguous()
        observe("start", name, x, group)
        if (small := small_sum_start(x, group)) is not None:
            return Pending(x, small, name, group)
        work = dist.all_reduce(x.detach(), group=group, async_op=True)
        # c10d writes without telling autograd: without this a saved `x` would be read as the sum, silently.
        if not x.is_inference():
            torch.autograd.graph.increment_version(x)
            if not torch.compiler.is_compiling():
                # of a view that was written to, autograd renews the history when it is asked for; `register_hook`
                # (FSDP2, on what a layer returns) crashes where nobody has asked (torch 2.11 to 2.13)
                _ = x.grad_fn
    return Pending(x, work, name, group)


def all_reduce(
    x: Tensor, group: ProcessGroup | None, name: str = "", *, format: str | None = None, min_bytes: int = 0
) -> Tensor:
    """Sum of the partial `x` over `group`, with arguments, gradient and effects of `all_reduce_start`."""
    if format is not None and x.nbytes >= min_bytes:
        return quantized_all_reduce(x, group, format=format, name=name)
    return all_reduce_wait(all_reduce_start(x, group, name))


def agreed(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """`x`, which every rank computed from what entered by `copy_to_group`: the gradients sum to the value's."""
    if group is None or group.size() == 1:
        return x
    return with_gradient(x, backward=lambda gradient: gradient / group.size())


# --- gather and its relatives ---


def all_gather(x: Tensor, group: ProcessGroup | None, dim: int, name: str = "") -> Tensor:
    """Equal shards concatenated along `dim` in rank order. The gradient, a shard's own slice, is right when what
    follows is replicated: every rank then holds the full gradient already."""
    if group is None or group.size() == 1:
        return x

    def gathered(x: Tensor) -> Tensor:
        x = x.contiguous()
        if (parts := small_gather(x, group)) is not None:
            return torch.cat(parts, dim)
        shards = x.new_empty(group.size(), *x.shape)
        all_gather_flat(shards.flatten(0, 1), x, group=group)
        at = dim % x.dim()
        return shards.movedim(0, at).flatten(at, at + 1)  # without a copy where no larger dimension comes before

    with annotated("all_gather", name):
        observe("all_gather", name, x, group)
        return with_gradient(x, gathered, lambda gradient: own_shard(gradient, group, dim).contiguous())


def repeat_shard(x: Tensor, group: ProcessGroup | None, dim: int) -> Tensor:
    """`x` in place of every rank's shard: the shape of `all_gather` without its communication, for timing only."""
    return torch.cat([x] * group_size(group), dim=dim)


def own_shard(x: Tensor, group: ProcessGroup | None, dim: int) -> Tensor:
    """This rank's equal run of the replicated `x` along `dim`, whose size divides by the number of ranks."""
    local = x.shape[dim] // group_size(group)
    return x.narrow(dim, group_rank(group) * local, local)


def own_ranges(x: Tensor, group: ProcessGroup | None, dim: int, ranges: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
    """This rank's parts of the replicated `x` along `dim`: `ranges` has per rank the (begin, end) of each, in order."""
    parts = [x.narrow(dim, begin, end - begin) for begin, end in ranges[group_rank(group)]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def once(x: Tensor | None, group: ProcessGroup | None) -> Tensor | None:
    """`x` on the group's first rank and zeros elsewhere, so that a following sum adds it once; None stays None. After
    the sum each rank holds the full gradient, so replicas stay equal."""
    if x is None or group is None or group.size() == 1:
        return x
    return with_gradient(x, identity if group.rank() == 0 else torch.zeros_like)


def share(x: Tensor | None, group: ProcessGroup | None) -> Tensor | None:
    """`x` divided by the number of ranks, so that a sum adds it once, each rank an equal part; None stays None.

    Unlike the result of `once` it may be read before the sum, where ranks differ: the gradient is that of every rank,
    summed and divided by their number.
    """
    if x is None or group is None or group.size() == 1:
        return x
    return copy_to_group(x, group) / group.size()


@dataclass(frozen=True)
class Shared:
    """Rows of a full parameter that this rank holds, where rows are held more than once.

    `ranges` are half-open row ranges of the full size, in the order of the local rows; across ranks, and within one,
    they may overlap. KV heads that are replicated over ranks are the usual case.
    """

    size: int
    ranges: tuple[tuple[int, int], ...]
    group: ProcessGroup | None

    @property
    def rows(self) -> int:
        """Number of rows on this rank."""
        return sum(end - start for start, end in self.ranges)

    @classmethod
    def run(cls, size: int, rows: int, starts: Sequence[int], group: ProcessGroup | None) -> Shared:
        """Rank r of `group` holds `rows` rows from `starts[r]` on."""
        start = starts[group_rank(group)]
        return cls(size, ((start, start + rows),), group)

    @classmethod
    def rows_of(cls, size: int, ranges: Sequence[tuple[tuple[int, int], ...]], group: ProcessGroup | None) -> Shared:
        """Rank r of `group` holds `ranges[r]`."""
        return cls(size, ranges[group_rank(group)], group)


def shared_gradient(x: Tensor, shared: Shared) -> Tensor:
    """`x` [local rows, ...] itself; its gradient sums those of every copy of a row, on all ranks of the group. Else
    each copy would learn from its own query heads only, and the copies would drift apart."""

    def of_every_copy(gradient: Tensor) -> Tensor:
        total = gradient.new_zeros((shared.size, *gradient.shape[1:]))
        offset = 0
        for start, end in shared.ranges:
            total[start:end] += gradient[offset : offset + end - start]
            offset += end - start
        if shared.group is not None and shared.group.size() > 1:
            dist.all_reduce(total, group=shared.group)
        return torch.cat([total[start:end] for start, end in shared.ranges])

    return with_gradient(x, backward=of_every_copy)

"""Functions with a gradient of our choice, since one rank's graph cannot say what a value is on all ranks, and the one
of them whose gradient travels: `copy_to_group`, where a replicated value enters computation that differs per rank.

In backward its sum is started as soon as a rank's part of the gradient is there, and waited for as late as possible:
what else is ready is computed first. In a ladder that is the other block, whose backward does not depend on it
(Ladder Residual, arXiv 2501.06589, Alg. 1, read backwards): training hides its all-reduces as inference does. Where
nothing else is ready, as in the standard wiring, the wait follows at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.distributed import ProcessGroup

from rewriter.runtime.collectives.log import observe


class _WithGradient(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.of_gradient = backward
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.of_gradient(gradient), None, None


def identity(x: Tensor) -> Tensor:
    """A view of `x`: autograd wants another tensor than the one that it gave."""
    return x.view_as(x)


def with_gradient(
    x: Tensor, forward: Callable[[Tensor], Tensor] = identity, backward: Callable[[Tensor], Tensor] = identity
) -> Tensor:
    """`forward(x)`, whose gradient is `backward` of the result's; differentiable once."""
    result: Tensor = _WithGradient.apply(x, forward, backward)
    return result


# How many this thread has made. Autograd numbers functions by thread, too: reentrant checkpointing makes them on the
# thread of a device's backward.
_waits = threading.local()


def _last_of_all(x: Tensor) -> None:
    """Let backward come to the function that made `x` when nothing else is ready, before earlier ones of its kind.

    Autograd runs, of all functions whose gradients are there, the one made last; for this there is no public method.
    """
    node: Any = x.grad_fn
    # fewer than any function's number: each of these was counted there too
    count = getattr(_waits, "count", 0)
    node._set_sequence_nr(count)
    _waits.count = count + 1


def copy_to_group(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """`x` itself; its gradient is summed over `group`.

    Stands where a replicated value (a hidden state, a norm weight shared by all heads, a router's weights) enters
    computation that differs per rank. Backward sums asynchronously: see the head of this file.
    """
    if group is None or group.size() == 1:
        return x
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x

    def summed(gradient: Tensor) -> Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    if x.is_leaf or torch.compiler.is_compiling():
        # In one step: FSDP2 reduces a layer's parameters once the gradients of its inputs are there, and would not see
        # a later one; compiled graphs have another order.
        return with_gradient(x, backward=summed)
    works: list[Any] = []  # the all-reduce of one backward pass, between its start and its wait

    def start(gradient: Tensor) -> Tensor:
        # a new tensor: autograd may hand the same gradient to other branches
        total = gradient.clone(memory_format=torch.contiguous_format)
        observe("gradient start", "copy_to_group", total, group)
        works.append(dist.all_reduce(total, group=group, async_op=True))
        if torch.is_anomaly_enabled():  # which looks for NaN in what is still on its way
            works[0].wait()
        return total

    def wait(gradient: Tensor) -> Tensor:
        observe("gradient wait", "copy_to_group", gradient, group)
        works.pop().wait()
        return gradient

    awaited = with_gradient(x, backward=wait)
    _last_of_all(awaited)
    return with_gradient(awaited, backward=start)

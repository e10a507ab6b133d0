"""A function of one tensor with a gradient of our choice: what a value is on all ranks, one rank's graph cannot say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.function import Function, once_differentiable


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

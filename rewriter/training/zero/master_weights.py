"""An Optimizer of masters: what schedulers, trainers and users hold where a rank steps only its part of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from rewriter.common.errors import RewriterError

Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


def groups_of_parameters(model: nn.Module, params: Parameters | None) -> list[dict[str, Any]]:
    """Groups as torch.optim's classes take them: of `params`, by default all of `model` that require a gradient."""
    wanted: list[Any] = [p for p in model.parameters() if p.requires_grad] if params is None else list(params)
    return wanted if wanted and isinstance(wanted[0], dict) else [{"params": wanted}]


class MasterOptimizer(Optimizer):
    """Shows `param_groups` and `state` of an optimizer of masters. A subclass makes them, steps and clears them."""

    name: str  # what errors call it

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self._complete = inner, False
        super().__init__(inner.param_groups, inner.defaults)
        self._adopt()
        self._complete = True

    def _adopt(self) -> None:
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def _follow(self, model: nn.Module, parameters: Sequence[nn.Parameter], loaded: Callable[[int], None]) -> None:
        """`model.zero_grad` clears masters too; `loaded` gets the index of each parameter that was loaded, even if
        into a part of the model."""
        places = {id(p): i for i, p in enumerate(parameters)}
        for module in model.modules():
            own = [places[id(p)] for p in module._parameters.values() if id(p) in places]
            if own:
                module.register_load_state_dict_post_hook(partial(_each, loaded, own))
        zero_grad = model.zero_grad

        def zero_both(set_to_none: bool = True) -> None:
            zero_grad(set_to_none)
            self.zero_grad(set_to_none)

        model.zero_grad = zero_both  # type: ignore[method-assign]

    def _load_inner(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self._adopt()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._complete:
            raise RewriterError(f"{self.name}: parameter groups are given once. Pass them all as params=")
        super().add_param_group(param_group)


def _each(loaded: Callable[[int], None], own: list[int], module: nn.Module, keys: Any) -> None:
    for index in own:
        loaded(index)


def clip(gradients: Sequence[Tensor], squares: Tensor, groups: Sequence[ProcessGroup], max_norm: float) -> Tensor:
    """Scale `gradients` so that the root of the sum of `squares` over all `groups` is at most `max_norm`: that root."""
    for group in groups:
        dist.all_reduce(squares, group=group)
    norm = squares.sqrt()
    if gradients:
        torch._foreach_mul_(list(gradients), (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm

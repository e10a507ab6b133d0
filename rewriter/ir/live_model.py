"""A live model behind a simulation: its own modules compute what the program holds as opaque."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from rewriter.common.errors import RewriterError
from rewriter.ir import Opaque, Program
from rewriter.weights.finite import require_finite
from rewriter.weights.plain_model import plain_model

Call = tuple[tuple[Any, ...], dict[str, Any]]


def opaque_modules(program: Program) -> dict[str, Opaque]:
    """The modules that stay the source's own, by path."""
    return {path: module for path, module in program.modules.items() if isinstance(module, Opaque)}


@functools.lru_cache(maxsize=1)
def load_host(path: str, remote_code: bool, dtype: torch.dtype) -> nn.Module:
    """The unmodified eager model of a checkpoint directory, in eval mode. Raises RewriterError where a weight is not
    finite."""
    model = plain_model(path, remote_code)[0].to(dtype)
    require_finite(model.named_parameters(), path)
    return model


class Host:
    """The opaque modules of a program in a live model, and what the unmodified model gives them on one input.

    Raises RewriterError when `model` has no such modules.
    """

    def __init__(self, program: Program, model: nn.Module) -> None:
        self.model = model
        modules = dict(model.named_modules())
        self.opaque = opaque_modules(program)
        for path, module in self.opaque.items():
            if type(modules.get(path)).__name__ != module.class_name:
                raise RewriterError(
                    f"the host model has no {path} of class {module.class_name}: it has to be the model that the "
                    "program was traced from"
                )
        self.modules = {path: modules[path] for path in self.opaque}
        self.calls: dict[str, Call] = {}

    @torch.no_grad()
    def run(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None) -> None:
        """Run the unmodified model, without a cache, and keep what each opaque module is given next to the wiring's."""
        given = {} if position_ids is None else {"position_ids": position_ids}
        self.calls = calls = {}

        def hook(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if path in calls:
                raise RewriterError(f"{path} is called more than once in a forward pass, which is not supported")
            tree: Any = (args, dict(kwargs))
            for place in self.opaque[path].places:  # these the wiring computes
                tree = _replaced(tree, place, None)
            calls[path] = tree

        with ExitStack() as stack:
            for path, module in self.modules.items():
                before = functools.partial(hook, path)
                stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            self.model(input_ids=input_ids, use_cache=False, **given)

    def call(
        self, path: str, opaque: Opaque, inputs: list[torch.Tensor], parameters: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Result of the module at `path` with these parameters, given `inputs` in the places of the wiring's."""
        tree: Any = self.calls[path]
        for place, value in zip(opaque.places, inputs, strict=True):
            tree = _replaced(tree, place, value)
        result = torch.func.functional_call(self.modules[path], dict(parameters), *tree)
        values = (result,) if opaque.indices is None else tuple(result[i] for i in opaque.indices)
        for value, shape in zip(values, opaque.outputs, strict=True):
            known = [(a, b) for a, b in zip(value.shape, shape, strict=False) if isinstance(b, int)]
            if value.ndim != len(shape) or any(a != b for a, b in known):
                raise RewriterError(f"{path} returned {list(value.shape)}, its trace says {list(shape)}")
        return values[0] if len(values) == 1 else values


def _replaced(tree: Any, place: tuple[Any, ...], value: torch.Tensor | None) -> Any:
    """`tree` of tuples, lists and dicts with `value` at `place`."""
    if not place:
        return value
    step, *rest = place
    if isinstance(tree, dict):
        return {**tree, step: _replaced(tree[step], tuple(rest), value)}
    items = [_replaced(item, tuple(rest), value) if i == step else item for i, item in enumerate(tree)]
    return items if isinstance(tree, list) else tuple(items)

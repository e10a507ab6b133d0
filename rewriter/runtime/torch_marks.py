"""Marks on our functions and classes for torch's compiler and its pytrees, made without importing Dynamo: that takes a
second, in every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

F = TypeVar("F", bound=Callable[..., object])


def assume_constant_result(function: F) -> F:
    """Dynamo calls it once, while it traces. The private name is what torch.compiler.assume_constant_result sets."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def not_compiled(function: F) -> F:
    """Dynamo does not look into it. Torch's private decorator for its own functions, which imports Dynamo at the first
    call."""
    disabled: F = torch._disable_dynamo(function)  # type: ignore[attr-defined, assignment]
    return disabled


def register_node(kind: type[Any], tensors: Sequence[str], constants: Sequence[str]) -> None:
    """Make `kind` a node of its attributes `tensors`; `constants` are the others, which go with it as they are."""

    def flatten(node: Any) -> tuple[list[Any], list[Any]]:
        return [getattr(node, name) for name in tensors], [getattr(node, name) for name in constants]

    def unflatten(parts: Any, context: Any) -> Any:
        node = object.__new__(kind)
        vars(node).update(zip((*tensors, *constants), (*parts, *context), strict=True))
        return node

    name = f"rewriter.runtime.{kind.__name__}"
    pytree.register_pytree_node(kind, flatten, unflatten, serialized_type_name=name)

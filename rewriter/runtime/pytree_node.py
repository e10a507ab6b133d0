"""Classes of ours as pytree nodes: hooks on modules and torch.compile see the tensors in them and keep the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils import _pytree as pytree


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

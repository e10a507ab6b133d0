"""A mapping that a model hands to all of its layers: some put tensors into it, later ones read them (keys and values
that layers share).

While children of layers are traced, a `SharedValues` stands in its place. It is a container of tensors like any other,
so that what is in it are inputs of a child, and what the child put into it are further results.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rewriter.tracing.interception import Recorded


class SharedValues(dict[Any, Any]):
    """The mapping; `written` are the keys that were set since it was made."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.written: list[Any] = []

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.written.append(key)


def _rebuilt(values: Any, keys: Any) -> SharedValues:
    return SharedValues(zip(keys, values, strict=True))


pytree.register_pytree_node(SharedValues, lambda shared: (list(shared.values()), list(shared)), _rebuilt)


def is_shared(value: Any) -> bool:
    """True for an empty mapping of a model's own that its layers may fill."""
    return isinstance(value, MutableMapping) and not len(value)


def with_shared(call: Recorded, values: SharedValues) -> Recorded:
    """`call`, given `values` in place of each mapping that layers share."""

    def given(value: Any) -> Any:
        return values if is_shared(value) or isinstance(value, SharedValues) else value

    return Recorded(tuple(map(given, call.args)), {name: given(value) for name, value in call.kwargs.items()})


def shared_in(tree: Any) -> Iterator[SharedValues]:
    """The mappings among (args, kwargs) of a call."""
    args, kwargs = tree
    return (value for value in (*args, *kwargs.values()) if isinstance(value, SharedValues))


def written_outputs(call: Recorded) -> tuple[dict[Any, tuple[int, ...]], tuple[int, ...]]:
    """(by key, the places of the tensors that a call put into a shared mapping, among all of these; their places after
    the tensors that it returned)."""
    places: dict[Any, tuple[int, ...]] = {}
    count = 0
    for shared in shared_in((call.args, call.kwargs)):
        for key in dict.fromkeys(shared.written):
            size = len(pytree.tree_leaves(shared[key]))
            places[key] = tuple(range(count, count + size))
            count += size
    returned = sum(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(call.output))
    return places, tuple(range(returned, returned + count))


def written_values(tree: Any) -> list[torch.Tensor]:
    """The tensors that a call put into mappings among its (args, kwargs), in order."""
    leaves = ((shared[key] for key in dict.fromkeys(shared.written)) for shared in shared_in(tree))
    return [x for values in leaves for value in values for x in pytree.tree_leaves(value)]

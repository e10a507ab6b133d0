"""Calls of modules while a model runs: recorded with arguments, told apart by constants, replaced by one operator.

A module that is called several times with other constants (Gemma 3's rotary embedding, per layer type) has one variant
per set of constants: `name`, `name#1`, …
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree  # the stable subset: tree_flatten, tree_unflatten

from rewriter.tracing.interception import Recorded, opaque_calls, replaced_forward
from rewriter.tracing.wiring import leaves_with_paths


def record_calls(run: Callable[[], Any], modules: Mapping[str, nn.Module]) -> dict[str, Recorded]:
    """The calls of each module while `run()` executes: Python arguments and result, by variant name."""
    variants = Variants()
    recorded: dict[str, Recorded] = {}

    def hook(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        call = Recorded(args, dict(kwargs), output)
        recorded.setdefault(variants.name(name, call), call)

    with contextlib.ExitStack() as stack:
        for name, module in modules.items():
            after = functools.partial(hook, name)
            stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)
        run()
    return recorded


class Variants:
    """Numbers the calls of a module by the constants among their arguments, in order of appearance."""

    def __init__(self) -> None:
        self.seen: dict[str, list[str]] = {}

    def name(self, module: str, call: Recorded) -> str:
        leaves = leaves_with_paths((call.args, call.kwargs))
        constants = repr([(path, None if isinstance(leaf, torch.Tensor) else leaf) for path, leaf in leaves])
        known = self.seen.setdefault(module, [])
        if constants not in known:
            known.append(constants)
        return variant_name(module, known.index(constants))


def tensors_of(recorded: Recorded) -> tuple[list[torch.Tensor], Callable[[Sequence[Any]], tuple[Any, Any]]]:
    """The tensor leaves of a call, and how to rebuild (args, kwargs) around other ones."""
    leaves, spec = pytree.tree_flatten((recorded.args, recorded.kwargs))
    slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def rebuild(tensors: Sequence[Any]) -> tuple[Any, Any]:
        filled = list(leaves)
        for slot, tensor in zip(slots, tensors, strict=True):
            filled[slot] = tensor
        return pytree.tree_unflatten(filled, spec)

    return [leaves[i] for i in slots], rebuild


def tensor_paths(call: Recorded) -> tuple[tuple[Any, ...], ...]:
    """The paths into (args, kwargs) of the tensors of a call."""
    leaves = leaves_with_paths((call.args, call.kwargs))
    return tuple(path for path, leaf in leaves if isinstance(leaf, torch.Tensor))


def base_name(variant: str) -> str:
    """`rotary_emb#1` is a variant of the module `rotary_emb`."""
    return variant.partition("#")[0]


def variant_name(module: str, index: int) -> str:
    """`base_name` the other way round."""
    return f"{module}#{index}" if index else module


def layer_number(call: str) -> int | None:
    """Number of the layer that a recorded call stands for; None for another module."""
    name, _, number = call.partition(" ")
    return int(number) if name == "layer" else None


@contextlib.contextmanager
def intercepted_modules(modules: Mapping[str, nn.Module], calls: Mapping[str, Recorded]) -> Iterator[None]:
    """Calling one of `modules` records one `rewriter_trace::call` with its variant name, as `record_calls` gave it."""
    variants = Variants()
    rebuilds: dict[str, Any] = {}
    specs: dict[str, Any] = {}

    def run_variant(key: str, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        module, (args, kwargs) = modules[base_name(key)], rebuilds[key](inputs)
        leaves, specs[key] = pytree.tree_flatten(type(module).forward(module, *args, **kwargs))
        return leaves

    def forward(name: str, *args: Any, **kwargs: Any) -> Any:
        call = Recorded(args, kwargs)
        key = variants.name(name, call)
        tensors, rebuilds[key] = tensors_of(call)
        outputs = torch.ops.rewriter_trace.call(tensors, key)
        return pytree.tree_unflatten(list(outputs), specs[key])

    functions = {key: functools.partial(run_variant, key) for key in calls}
    forwards = {modules[name]: functools.partial(forward, name) for name in map(base_name, calls)}
    with opaque_calls(functions), replaced_forward(forwards):
        yield


def input_names(module: nn.Module, recorded: Recorded) -> list[str]:
    """Name of each tensor of a call in the module's own signature."""
    parameters = list(inspect.signature(type(module).forward).parameters)[1:]
    names: list[str] = []
    for path in tensor_paths(recorded):
        base = str(path[1]) if path[0] == 1 else parameters[path[1]]
        if base == "position_embeddings" and len(path) == 3 and path[2] in (0, 1):
            names.append(("cos", "sin")[path[2]])
        else:
            names.append("_".join([base, *map(str, path[2:])]))
    return names

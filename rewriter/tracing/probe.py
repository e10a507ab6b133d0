"""With which arguments a model calls its decoder layers: which of them stay None whatever happens."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache, PreTrainedModel

from rewriter.common.cache_names import cache_argument
from rewriter.common.errors import RewriterError
from rewriter.ir import SPLAT
from rewriter.tracing.export import Example
from rewriter.tracing.interception import replaced_forward
from rewriter.tracing.model_errors import first_line
from rewriter.tracing.wiring import forward_signature, layer_signature


def bind(layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the layer's own parameter names; what goes into its **kwargs stands under SPLAT."""
    kind: Any = type(layer)
    signature = forward_signature(kind)
    bound = signature.bind(layer, *args, **kwargs)
    bound.apply_defaults()
    arguments = dict(list(bound.arguments.items())[1:])
    variadic = next((n for n, p in signature.parameters.items() if p.kind == p.VAR_KEYWORD), None)
    if variadic:
        arguments[SPLAT] = arguments.pop(variadic)
    return arguments


def example_inputs(model: PreTrainedModel, layers: list[nn.Module], sizes: Example) -> dict[str, torch.Tensor]:
    """Meta inputs of a trace: ids and, where the model takes them, positions. There is no mask: nothing is padded.

    A model that is given no positions and counts them by comparing ids with padding (RoBERTa's begin at 2) is traced
    without: its positions are not those that others count.
    """
    ids = torch.zeros(sizes.batch, sizes.length, dtype=torch.int64, device="meta")
    example = {"input_ids": ids, "position_ids": torch.zeros_like(ids)}
    kind: Any = type(model)
    parameters = forward_signature(kind).parameters
    variadic = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    example = {name: x for name, x in example.items() if name in parameters or variadic}
    without = {"input_ids": ids}
    counts = _compares_ids(model, layers, without) and not _compares_ids(model, layers, example)
    return without if counts else example


class _Comparisons(TorchFunctionMode):
    """Notes whether a tensor is compared with something."""

    def __init__(self, watched: torch.Tensor) -> None:
        super().__init__()
        self.watched, self.compared = watched, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        self.compared |= name in ("ne", "eq", "__ne__", "__eq__", "not_equal") and any(x is self.watched for x in args)
        return func(*args, **(kwargs or {}))


def _compares_ids(model: PreTrainedModel, layers: list[nn.Module], inputs: dict[str, torch.Tensor]) -> bool:
    with _Comparisons(inputs["input_ids"]) as mode:
        next(_runs(model, layers, {**inputs, "use_cache": False}))
    return mode.compared


def absent_arguments(
    model: PreTrainedModel, layers: list[nn.Module], example: Mapping[str, torch.Tensor]
) -> dict[nn.Module, dict[str, None]]:
    """Per layer, the arguments that stay None also with a cache and with padding: its wiring holds them constant.

    `example` are the inputs of the model, on meta. The layers themselves do not run. Raises RewriterError when the
    model does not call them as modules.
    """
    # On the CPU and not all ones: models ask whether a mask hides anything, which has no answer on meta.
    padded = torch.ones(example["input_ids"].shape, dtype=torch.int64)
    padded[:, 0] = 0
    seen: dict[nn.Module, list[dict[str, Any]]] = {layer: [] for layer in layers}
    failures: list[Exception] = []
    for extra in (
        {"use_cache": False},
        {"use_cache": False, "attention_mask": padded},
        {"use_cache": False, "attention_mask": padded.to("meta")},
        {"use_cache": True},
        {"use_cache": True, cache_argument(model): DynamicCache(config=model.config)},
    ):
        for run in _runs(model, layers, {**example, **extra}, failures):
            for layer, call in run.items():
                seen[layer].append(call)
            if len(run) == len(layers):
                break
    if not any(seen.values()):
        text = f" ({first_line(failures[0])})" if failures else ""
        raise RewriterError(
            f"{type(model).__name__} does not call its decoder layers as modules{text}; nothing to trace."
        )
    known = {type(layer): calls for layer, calls in seen.items() if calls}
    result = {}
    for layer in layers:
        calls = seen[layer] or known.get(type(layer), [])
        names = layer_signature(layer)[0]
        result[layer] = {n: None for n in names if calls and all(call.get(n) is None for call in calls)}
    return result


def switched_off(
    model: PreTrainedModel, layers: list[nn.Module], example: Mapping[str, torch.Tensor], layer: nn.Module
) -> dict[str, bool]:
    """The arguments of `layer` that are False with a cache and without: what a program never asks for (weights of
    attention beside the hidden state)."""
    runs = (run for cache in (False, True) for run in _runs(model, layers, {**example, "use_cache": cache}))
    calls = [run[layer] for run in runs if layer in run]
    return {n: False for n in layer_signature(layer)[0] if calls and all(call.get(n) is False for call in calls)}


def _runs(
    model: PreTrainedModel, layers: list[nn.Module], inputs: Mapping[str, Any], failures: list[Exception] | None = None
) -> Iterator[dict[nn.Module, dict[str, Any]]]:
    """The arguments of each layer in runs in which layers return what they are given, bare and then as a tuple.

    A run may end early, by an exception that is added to `failures`.
    """

    def forward(is_tuple: bool, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        arguments[layer] = bind(layer, args, kwargs)
        hidden = arguments[layer][layer_signature(layer)[0][0]]
        return (hidden,) if is_tuple else hidden

    for is_tuple in (False, True):
        arguments: dict[nn.Module, dict[str, Any]] = {}
        with (
            replaced_forward({layer: functools.partial(forward, is_tuple, layer) for layer in layers}),
            torch.no_grad(),
        ):
            try:
                model(**inputs)
            except Exception as error:  # a model need not run in every setting; what it called until then counts
                if failures is not None:
                    failures.append(error)
        yield arguments

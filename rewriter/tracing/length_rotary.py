"""Rotary embeddings whose frequencies depend on the length of a call, traced as functions of its positions.

transformers looks at the largest position of a call, changes buffers of the module, and some models choose in Python.
While a model is traced, its modules compute the same from the positions alone:

- longrope: one of two sets of frequencies, the long one for calls beyond the length of pretraining;
- dynamic NTK: a base that grows with the length, beyond the positions of the config.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rewriter.common.errors import RewriterError

_PRETRAINED = "original_max_position_embeddings"
_LONG, _STEPS = "long_inv_freq", "frequency_steps"


@contextlib.contextmanager
def rotary_by_length(model: nn.Module, buffers: dict[str, torch.Tensor]) -> Iterator[None]:
    """Let the modules of `model` that depend on a call's length say so in their graphs, for the duration of the block.

    `buffers` are the values of the model's buffers by name; the second sets of frequencies are added to them. Raises
    RewriterError for a kind of scaling that transformers does not have itself.
    """
    changed: list[tuple[nn.Module, type[nn.Module]]] = []
    added: list[tuple[nn.Module, str]] = []
    try:
        for path, module in model.named_modules():
            kinds = _kinds(module)
            if not kinds:
                continue
            for layer_type, kind in kinds.items():
                if kind not in ("dynamic", "longrope"):
                    raise RewriterError(f"{path}: rotary scaling {kind!r} is not known. Known: dynamic, longrope")
                name, value = _table(module, layer_type, kind)
                buffers[f"{path}.{name}"] = value
                device = module._buffers[_named(layer_type, "inv_freq")].device
                module.register_buffer(name, value.to(device), persistent=False)
                added.append((module, name))
            cls = type(module)
            changed.append((module, cls))
            own = {"forward": _forward(cls, kinds), "__module__": cls.__module__}
            module.__class__ = type(cls.__name__, (cls,), own)
        yield
    finally:
        for module, cls in changed:
            module.__class__ = cls
        for module, name in added:
            del module._buffers[name]


def _kinds(module: nn.Module) -> dict[str | None, str]:
    """The length-dependent scaling of a module by layer type (None: of all layers)."""
    said = getattr(module, "rope_type", None)
    by_layer_type = said if isinstance(said, Mapping) else {None: said}
    return {t: k for t, k in by_layer_type.items() if isinstance(k, str) and ("dynamic" in k or k == "longrope")}


def _named(layer_type: str | None, name: str) -> str:
    return name if layer_type is None else f"{layer_type}_{name}"


def pretrained_length(config: Any, layer_type: str | None = None) -> int:
    """The largest length of a call, in tokens, for which longrope takes its short factors."""
    settings = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    return int(settings[_PRETRAINED])


def renewed_after(model: PreTrainedModel) -> int | None:
    """The tokens after which generation computes all keys and values anew, since those before have the other set of
    frequencies; None where a model's `prepare_inputs_for_generation` does not."""
    code = inspect.unwrap(type(model).prepare_inputs_for_generation).__code__
    length = getattr(model.config, _PRETRAINED, None)
    return length if _PRETRAINED in (*code.co_consts, *code.co_names) and by_length(model) else None


def by_length(model: nn.Module) -> bool:
    """True where what a token computes depends on how long its call is."""
    return any(map(_kinds, model.modules()))


def _frequencies(module: nn.Module, layer_type: str | None, length: Any, device: Any = None) -> torch.Tensor:
    """fp32 [pairs of channels] for a call of `length` tokens, by transformers' own function."""
    make = ROPE_INIT_FUNCTIONS[_kinds(module)[layer_type]]
    named = {} if layer_type is None else {"layer_type": layer_type}
    frequencies: torch.Tensor = make(module.config, device, seq_len=length, **named)[0]
    return frequencies


def _table(module: Any, layer_type: str | None, kind: str) -> tuple[str, torch.Tensor]:
    """(name, value) of the buffer that a module gets: the long set of frequencies, or what dynamic ones are made of."""
    if kind == "longrope":
        length = pretrained_length(module.config, layer_type) + 1
        return _named(layer_type, _LONG), _frequencies(module, layer_type, length)
    pairs = len(module._buffers[_named(layer_type, "inv_freq")])
    return _named(layer_type, _STEPS), torch.arange(0, 2 * pairs, 2)


def _forward(cls: type[nn.Module], kinds: Mapping[str | None, str]) -> Callable[..., Any]:
    def forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        named = {} if layer_type is None else {"layer_type": layer_type}
        kind = kinds.get(layer_type)
        if kind is None:
            return cls.forward(self, x, position_ids, **named)
        name, length = _named(layer_type, "inv_freq"), position_ids.max() + 1
        if kind == "dynamic":
            with _Instead(torch.arange, self._buffers[_named(layer_type, _STEPS)]):  # which names no device
                frequencies = _frequencies(self, layer_type, length, x.device)
            with _fixed(self, name, frequencies):
                return cls.forward(self, x, position_ids, **named)
        pretrained = pretrained_length(self.config, layer_type)
        with _Instead(torch.max, pretrained - 1), _fixed(self, name, self._buffers[name]):
            short = cls.forward(self, x, position_ids, **named)
        with _Instead(torch.max, pretrained), _fixed(self, name, self._buffers[_named(layer_type, _LONG)]):
            long = cls.forward(self, x, position_ids, **named)
        return pytree.tree_map(lambda a, b: torch.where(length > pretrained, a, b), long, short)

    return forward


@contextlib.contextmanager
def _fixed(module: Any, name: str, frequencies: torch.Tensor) -> Iterator[None]:
    """The module computes with `frequencies`, which it takes for its own and does not change."""
    own, kind, make = module._buffers[name], module.rope_type, getattr(module, "rope_init_fn", None)

    def of_no_length(*_: Any) -> tuple[torch.Tensor | None, Any]:
        return own, module.attention_scaling

    module._buffers[name], module.rope_type = frequencies, _Any("default")
    if make is not None:  # some modules compute the frequencies in every call, of no length
        module.rope_init_fn = of_no_length
    try:
        yield
    finally:
        module._buffers[name], module.rope_type = own, kind
        if make is not None:
            module.rope_init_fn = make


class _Any(str):
    """A kind of scaling, also in the place of a table of kinds by layer type."""

    def __getitem__(self, layer_type: Any) -> str:
        return str(self)


class _Instead(TorchFunctionMode):
    """One function returns a given value: of the largest position a number of Python, by which models choose."""

    def __init__(self, function: Any, value: Any) -> None:
        super().__init__()
        self.function, self.value = function, value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.value if func is self.function else func(*args, **(kwargs or {}))

"""The variants of a type: each switch of its config that changes what its forward computes, thrown alone.

Found, not listed: the booleans of the small config, the words that its class allows for a setting (`Literal`), and its
activation, as far as the model's code reads them. One that leaves parameters and logits as they are is no variant.
"""

from __future__ import annotations

import inspect
import re
import sys
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from rewriter.check.random_model import build_model, random_ids
from rewriter.check.reference_modes import original_logits
from rewriter.tracing.shrink import text_config

_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
# What no causal LM is asked for, or what adds another model beside it.
_OTHER = ("is_decoder", "is_encoder_decoder", "add_cross_attention", "use_cache", "torchscript", "return_dict")


def candidates(config: PreTrainedConfig, model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """(setting, another value) for every switch of `config` that the code of `model` reads; `text_config.name` names
    one of a config inside."""
    text = text_config(config)
    inner = next((f"{k}." for k, v in config.__dict__.items() if v is text), "") if text is not config else ""
    modules = {sys.modules[kind.__module__] for kind in map(type, model.modules())}
    code = "\n".join(inspect.getsource(m) for m in modules if m.__name__.startswith("transformers.models."))
    allowed = _words(type(text))
    for path, value in _settings(text.to_dict(), inner):
        name = path.rpartition(".")[2]
        if name in _OTHER or not re.search(rf"""config\.{name}\b|config, ["']{name}["']""", code):
            continue
        if isinstance(value, bool):
            yield path, not value
        elif name in _ACTIVATIONS and isinstance(value, str):
            yield path, "gelu" if value in ("silu", "swish") else "silu"
        else:
            yield from ((path, word) for word in allowed.get(name, ()) if word != value)


def _settings(data: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """The settings of a language model, with those of configs inside for its parts (`attn_config.alibi`)."""
    for name, value in sorted(data.items()):
        if isinstance(value, dict):
            if name.startswith(("attn", "attention", "ffn", "mlp", "ssm", "moe")):
                yield from _settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _words(kind: type) -> dict[str, tuple[Any, ...]]:
    """The words that a config's class allows, by setting."""
    try:
        hints = typing.get_type_hints(kind)
    except Exception:  # an annotation that only a type checker can read
        return {}
    options = {name: (hint, *typing.get_args(hint)) for name, hint in hints.items()}
    return {
        name: tuple(word for h in found if typing.get_origin(h) is typing.Literal for word in typing.get_args(h))
        for name, found in options.items()
    }


@torch.no_grad()
def changes_forward(one: PreTrainedModel, config: PreTrainedConfig) -> bool:
    """True if the model of `config` has other parameters than `one`, or computes something else with the same.

    Raises what the model's class raises, where it cannot be built or run so.
    """
    other, ids = build_model(config), random_ids(config, 21)
    weights = one.state_dict()
    if {n: t.shape for n, t in other.state_dict().items()} != {n: t.shape for n, t in weights.items()}:
        original_logits(other, ids)
        return True
    other.load_state_dict(weights)
    return not torch.allclose(original_logits(other, ids), original_logits(one, ids), rtol=1e-4, atol=1e-5)

"""A small config for every causal-LM type that transformers registers: the type's default one, shrunken.

`oddities.yaml` holds what is particular to a type, with its reason.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from rewriter.common.errors import RewriterError, nearest
from rewriter.tracing.shrink import representatives, shrink, text_config

# Sizes divide by it, so that two and four ranks can be tried.
RANKS = 4


def registered_types() -> list[str]:
    """The model types that AutoModelForCausalLM knows, sorted."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def image_types() -> list[str]:
    """The model types that AutoModelForImageTextToText knows, sorted."""
    return sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def require_registered(types: Sequence[str], images: bool = False) -> list[str]:
    """`types`, or all of them where none is named: those of causal language models, or with `images` of image-text
    models. Raises RewriterError for one that is not registered."""
    known, what = (image_types(), "image-text") if images else (registered_types(), "causal-LM")
    for name in types:
        if name not in known:
            guess = nearest(name, known)
            hint = f"Did you mean {guess!r}? " if guess else ""
            tries = f"`rewrite coverage{' --images' * images}`"
            raise RewriterError(f"{name}: no {what} type of transformers. {hint}{tries} tries all of them.")
    return list(dict.fromkeys(types)) or known


@functools.cache
def oddities() -> Mapping[str, Mapping[str, Any]]:
    """The table of oddities by type: `default`, arguments of the config's class; `layers`, which of them to keep;
    `set`, settings of the small config."""
    table: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_name("oddities.yaml").read_text(encoding="utf-8"))
    return table


@functools.cache
def image_oddities() -> Mapping[str, Mapping[str, Any]]:
    """The same of image-text types, and for those that have none of their own, as for the text."""
    table = yaml.safe_load(Path(__file__).with_name("oddities_images.yaml").read_text(encoding="utf-8"))
    return {**oddities(), **table}


def small_config(model_type: str, changes: Mapping[str, Any] = MappingProxyType({})) -> PreTrainedConfig:
    """A config of `model_type` with few layers of every kind and small sizes, of which the model is causal.

    `changes` are settings of the small config, by name (`text_config.name` in a config inside). Query heads share
    key/value heads wherever the type can do that. Raises RewriterError for a type that cannot be shrunken; what the
    config's class raises is passed on.
    """
    return _small(model_type, oddities().get(model_type, {}), changes)


def image_config(model_type: str) -> PreTrainedConfig:
    """The small config of an image-text type with its towers, which names the class that its checkpoints are of."""
    config = _small(model_type, image_oddities().get(model_type, {}), {})
    config.architectures = [MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type]]
    return config


def _small(model_type: str, oddity: Mapping[str, Any], changes: Mapping[str, Any]) -> PreTrainedConfig:
    config = CONFIG_MAPPING[model_type](**oddity.get("default", {}))
    layers = oddity.get("layers", representatives(config, []))
    return shrink(config, layers, RANKS, _changes(config) | dict(oddity.get("set", {})) | dict(changes))


def _changes(config: PreTrainedConfig) -> dict[str, Any]:
    """Settings whose defaults would leave something untried, or stop everything: dropout, attention to the future."""
    data, table = config.to_dict(), text_config(config).to_dict()
    changes: dict[str, Any] = {
        path: 0.0 for path, value in _settings(data) if "drop" in path and isinstance(value, float) and 0 < value < 1
    }
    if "is_decoder" in data:
        changes["is_decoder"] = True  # encoders attend to the future without it
    heads, kv_heads = table.get("num_attention_heads"), table.get("num_key_value_heads")
    if heads == kv_heads and isinstance(heads, int) and heads % RANKS == 0 and "kv_lora_rank" not in table:
        prefix = next((f"{name}." for name, inner in data.items() if isinstance(inner, dict) and inner == table), "")
        changes[f"{prefix}num_key_value_heads"] = RANKS // 2
    return changes


def _settings(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        if isinstance(value, dict):
            yield from _settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value

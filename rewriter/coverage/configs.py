"""A small config for every causal-LM type that transformers registers: the type's default one, shrunken.

What is particular to a type stands in `oddities.yaml` beside this file, with its reason, and nowhere else.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rewriter.errors import RewriterError
from rewriter.suggestions import did_you_mean
from rewriter.verify.shrink import representatives, shrink, text_table

# Sizes divide by it, so that two and four ranks can be tried.
RANKS = 4


def registered_types() -> list[str]:
    """The model types that AutoModelForCausalLM knows, sorted."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@functools.cache
def oddities() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """The table of oddities by type: `default`, arguments of the config's class; `set`, settings of the small one."""
    table: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_name("oddities.yaml").read_text(encoding="utf-8"))
    return table


def small_config(model_type: str) -> PreTrainedConfig:
    """A config of `model_type` with few layers of every kind and small sizes, of which the model is causal.

    Query heads share key/value heads wherever the type can do that. Raises RewriterError for a type that is not
    registered or cannot be shrunken; what the config's class raises is passed on.
    """
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise RewriterError(f"{model_type}: no causal-LM type. {did_you_mean(model_type, registered_types(), what='')}")
    oddity = oddities().get(model_type, {})
    config = CONFIG_MAPPING[model_type](**oddity.get("default", {}))
    return shrink(config, representatives(config, []), RANKS, _changes(config) | dict(oddity.get("set", {})))


def _changes(config: PreTrainedConfig) -> dict[str, Any]:
    """Settings whose defaults would leave something untried."""
    changes: dict[str, Any] = {}
    table = text_table(config)
    if "is_decoder" in config.to_dict():
        changes["is_decoder"] = True  # encoders attend to the future without it
    heads, kv_heads = table.get("num_attention_heads"), table.get("num_key_value_heads")
    if heads == kv_heads and isinstance(heads, int) and heads % RANKS == 0 and "kv_lora_rank" not in table:
        prefix = next((f"{k}." for k, v in config.to_dict().items() if isinstance(v, dict) and v == table), "")
        changes[f"{prefix}num_key_value_heads"] = RANKS // 2
    return changes

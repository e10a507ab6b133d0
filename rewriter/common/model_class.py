"""The class of transformers that a checkpoint's config names."""

from __future__ import annotations

import os
from typing import Any

import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.auto.auto_factory import _BaseAutoModelClass
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from rewriter.common.text_settings import given_on_load


def load_config(directory: str | os.PathLike[str], remote_code: bool = False) -> PreTrainedConfig:
    """The config of a checkpoint, with the settings that its config.json names for whoever loads it."""
    config = AutoConfig.from_pretrained(directory, trust_remote_code=remote_code)
    for name, value in given_on_load(vars(config)).items():
        setattr(config, name, value)
    return config


def auto_class(config: PreTrainedConfig) -> Any:
    """AutoModelForCausalLM or AutoModelForImageTextToText: which of them builds the class that `config` names.

    A type may have a class in both (Qwen3.5): `architectures` says which of them a checkpoint is of, and loaded as the
    other one it would lose its vision tower. Where it names neither, the causal language model goes first. Where it
    names a class that neither of them finds (`is_found`), an auto class of that one alone: models have no public
    `from_config`, and a registration would hold for all that the process loads.
    """
    kind = config.model_type
    name = (config.architectures or [""])[0]
    if not is_found(kind, name) and "AutoModelForCausalLM" not in (getattr(config, "auto_map", None) or {}):
        return type(name, (_BaseAutoModelClass,), {"_model_mapping": {type(config): getattr(transformers, name)}})
    if kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return AutoModelForCausalLM
    named = name == MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[kind]
    return (
        AutoModelForCausalLM if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not named else AutoModelForImageTextToText
    )


def is_found(model_type: str, architecture: str) -> bool:
    """False for a class of transformers that no auto class finds by the type in its checkpoint's config: saved alone,
    the language model inside another one (Mllama, Emu3) has a config of its own."""
    return has_class(model_type) or architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def takes_images(architecture: str) -> bool:
    """True if AutoModelForImageTextToText builds the class of that name for some type."""
    return architecture in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()


def has_class(model_type: Any) -> bool:
    """True if transformers has a class for a type that continues text, with or without images."""
    return model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

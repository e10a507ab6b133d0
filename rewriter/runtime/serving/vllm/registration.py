"""The names under which vLLM finds rewritten models: `RewriterLlamaForCausalLM`, of type `rewriter_llama`."""

from __future__ import annotations

from itertools import chain
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP

from rewriter.runtime.serving.vllm.phases import keep_cached_blocks_apart, use_known_runner

PREFIX, TYPE_PREFIX = "Rewriter", "rewriter_"  # of what is emitted


def register_all() -> None:
    """Every architecture that vLLM has layers for. Nothing of a model is imported before it is loaded."""
    keep_cached_blocks_apart()
    use_known_runner()
    native = {name for name, known in ModelRegistry.models.items() if not _on_backend(known)}
    mappings = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    for model_type, architecture in chain.from_iterable(mapping.items() for mapping in mappings):
        name = PREFIX + architecture
        if architecture not in native or name in native:
            continue
        ModelRegistry.register_model(name, f"{__name__}:{name}")
        if architecture in MODELS_CONFIG_MAP:  # what vLLM changes of an engine's settings for this architecture
            MODELS_CONFIG_MAP[name] = MODELS_CONFIG_MAP[architecture]
        AutoConfig.register(TYPE_PREFIX + model_type, _forwarding(TYPE_PREFIX + model_type), exist_ok=True)


def _on_backend(known: object) -> bool:
    """True where vLLM runs an architecture with transformers' code, as it does every one that it does not know."""
    return getattr(known, "module_name", "").endswith(".transformers")


def __getattr__(name: str) -> Any:
    """The class of a model, as `RewriterLlamaForCausalLM`."""
    if name.startswith(PREFIX):
        from rewriter.runtime.serving.vllm.model import rewritten_class

        native = ModelRegistry._try_load_model_cls(name.removeprefix(PREFIX))  # what vLLM itself loads by this name
        if native is not None:
            return rewritten_class(native)
    raise AttributeError(f"{__name__} has no {name}")


def _forwarding(model_type: str) -> type[PretrainedConfig]:
    """The class of `model_type` for transformers: it makes a config of the source's class and type, by which vLLM knows
    the model's attention. That class is imported only when it is used."""

    def from_dict(cls: Any, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        source = model_type.removeprefix(TYPE_PREFIX)
        return CONFIG_MAPPING[source].from_dict(config_dict | {"model_type": source}, **kwargs)

    return type(model_type, (PretrainedConfig,), {"model_type": model_type, "from_dict": classmethod(from_dict)})

"""Small models of every supported family, with weights that make a wrong rewrite visible.

With Hugging Face's default initialisation (std 0.02) a block writes almost nothing, so a ladder equals the original to
a few digits and a test of it cannot fail. Here every parameter is random (norm weights and biases too, so that a norm
that is applied twice, skipped or exchanged shows), and blocks write nearly as much as the stream holds.

Sizes are chosen for what they trip: windows shorter than every test length, fewer key/value heads than ranks, one
vocabulary that no TP degree divides, intermediate sizes that are no multiple of the hidden size.
"""

from __future__ import annotations

import functools
import math
import random
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

HIDDEN = 64
MAX_POSITIONS = 192

# Windows shorter than the shortest prompt, so that every test sees tokens leave them.
_WINDOW = 9

_COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "attention_dropout": 0.0,
    # No end token: greedy runs always reach their full length.
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_GATED = _COMMON | {"intermediate_size": 112, "num_key_value_heads": 2}
_GEMMA = _GATED | {
    "num_hidden_layers": 6,
    "head_dim": 24,
    # Not the head size: the scale of the scores has to be read from here.
    "query_pre_attn_scalar": 20,
    "sliding_window": _WINDOW,
}
_NEOX = _COMMON | {"intermediate_size": 144, "hidden_dropout": 0.0, "classifier_dropout": 0.0}

_CONFIGS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        # Eight query heads on two key/value heads: at TP=4 each key/value head lives on two ranks.
        "llama": _GATED | {"model_type": "llama", "num_attention_heads": 8},
        "llama_mha_bias": _GATED
        | {"model_type": "llama", "num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
        "llama_tied": _GATED | {"model_type": "llama", "tie_word_embeddings": True, "vocab_size": 320},
        "mistral": _GATED | {"model_type": "mistral", "sliding_window": _WINDOW, "num_attention_heads": 8},
        # Biases on q, k, v only; 259 is prime to 2 and 4.
        "qwen2": _GATED | {"model_type": "qwen2", "vocab_size": 259},
        "qwen3": _GATED | {"model_type": "qwen3", "head_dim": 24, "num_hidden_layers": 5},
        "gpt2": {
            "model_type": "gpt2",
            "vocab_size": 256,
            "n_embd": HIDDEN,
            "n_layer": 4,
            "n_head": 4,
            "n_positions": MAX_POSITIONS,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": None,
        },
        "gpt_neox": _NEOX | {"model_type": "gpt_neox", "use_parallel_residual": True},
        "gpt_neox_sequential": _NEOX | {"model_type": "gpt_neox", "use_parallel_residual": False},
        "gemma2": _GEMMA
        | {
            "model_type": "gemma2",
            "num_hidden_layers": 4,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 12.0,
        },
        "gemma3_text": _GEMMA
        | {
            "model_type": "gemma3_text",
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        },
        "olmo2": _GATED | {"model_type": "olmo2"},
        "mixtral": _GATED | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
        "qwen3_moe": _GATED
        | {
            "model_type": "qwen3_moe",
            "moe_intermediate_size": 48,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "head_dim": 16,
        },
    }
)

# Beside the families, types with one thing that none of them has, for the tests of that thing.
_VARIANTS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        # A logit per head that takes probability from every key (attention sinks), in windows and without.
        "gpt_oss": _GATED
        | {
            "model_type": "gpt_oss",
            "head_dim": 16,
            "intermediate_size": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": _WINDOW,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        # Multi-head latent attention: values narrower than queries and keys. All layers dense.
        "deepseek_v3": _COMMON
        | {
            "model_type": "deepseek_v3",
            "intermediate_size": 112,
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "first_k_dense_replace": 4,
        },
        # Attention within chunks of positions; rotation by complex numbers.
        "llama4_text": _GATED
        | {
            "model_type": "llama4_text",
            "head_dim": 16,
            "intermediate_size": 48,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": _WINDOW,
            "attn_temperature_tuning": False,
        },
    }
)

# What three ranks divide: families are named "llama@3" then.
_BY_THREE: dict[str, Any] = {
    "hidden_size": 96, "n_embd": 96, "num_attention_heads": 6, "n_head": 6, "num_key_value_heads": 3,
    "intermediate_size": 144, "moe_intermediate_size": 48, "num_experts": 6,
}  # fmt: skip

FAMILIES: tuple[str, ...] = tuple(_CONFIGS)
VARIANTS: tuple[str, ...] = tuple(_VARIANTS)
# One family of each kind: grouped heads; biases and an uneven vocabulary; fused and transposed projections with learned
# positions; parallel blocks; capped scores; two rotations and normed heads; norms after each block; experts. The
# others differ from these in sizes or mix what these have.
KINDS = ("llama", "qwen2", "gpt2", "gpt_neox", "gemma2", "gemma3_text", "olmo2", "qwen3_moe")


def config(name: str) -> PretrainedConfig:
    """A fresh config of `name`, one of FAMILIES or VARIANTS; with "@3" behind it, of sizes that three ranks divide."""
    found = {**_CONFIGS, **_VARIANTS}
    name, _, ranks = name.partition("@")
    if ranks:
        changes = {key: value for key, value in _BY_THREE.items() if key in found[name]}
        return AutoConfig.for_model(**found[name] | changes)
    if name not in found:
        raise KeyError(f"no family {name!r} in the zoo; there are {', '.join(found)}")
    return AutoConfig.for_model(**found[name])


def build(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A fresh model of family `name` on the CPU: eager attention and experts, eval mode, large random weights.

    The weights depend on `seed` and on parameter names only; another `dtype` holds the same float32 draws, converted.
    """
    with torch.random.fork_rng(devices=[]):  # Hugging Face's own initialisation must not move the caller's generator
        model = AutoModelForCausalLM.from_config(
            config(name), attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
        )
    randomize(model, seed)
    return model.to(dtype).eval()


@functools.cache
def shared(name: str, seed: int = 0) -> PreTrainedModel:
    """`build(name, seed)`, made once per process. For tests that do not change the model."""
    return build(name, seed)


def save(name: str, directory: str | Path, seed: int = 0) -> PreTrainedModel:
    """Write family `name` as a Hugging Face directory (config, generation config, safetensors) and return the model.

    Names on disk are the published ones: Mixtral's experts one by one, though the model holds them fused.
    """
    model = build(name, seed)
    model.save_pretrained(directory)
    return model


def selections(depth: int) -> dict[str, set[int]]:
    """The selections of ladder layers that every family is tested with: all, upper half, scattered."""
    return {"all": set(range(depth)), "upper-half": set(range(depth // 2, depth)), "scattered": {1, 3}}


def prompts(n: int = 8, vocab: int = 256) -> list[list[int]]:
    """`n` prompts of different lengths, each of at least 16 distinct tokens. Tokens 0 (padding) and 1 never occur."""
    draw = random.Random(20)
    return [draw.sample(range(2, vocab), 16 + 3 * i) for i in range(n)]


def batch(rows: int = 2, length: int = 21, vocab: int = 256, seed: int = 0) -> torch.Tensor:
    """Random token ids, int64 (rows, length), without tokens 0 and 1."""
    return torch.randint(2, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def randomize(model: PreTrainedModel, seed: int) -> None:
    """Overwrite every parameter of `model` in place. Each is drawn from a generator of its own, seeded by its name."""
    for name, parameter in model.named_parameters():  # a tied parameter comes once, under its first name
        mean, std = _scale(model, name, parameter)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
        parameter.copy_(mean + std * torch.randn(parameter.shape, generator=generator))


def _scale(model: PreTrainedModel, name: str, parameter: torch.Tensor) -> tuple[float, float]:
    """Mean and standard deviation of a parameter: the stream starts at about 1 and each block writes about 1."""
    owner = model.get_submodule(name.rpartition(".")[0])
    gemma = model.config.model_type.startswith("gemma")
    if parameter.ndim == 1 and name.endswith("bias"):
        return 0.0, 0.15
    if parameter.ndim == 1:
        identity = 0.0 if gemma else 1.0  # Gemma multiplies by 1 + weight
        if model.config.tie_word_embeddings and name.endswith(("model.norm.weight", "ln_f.weight")):
            # Random signs before a tied head: else every token predicts itself, and greedy text is one token repeated.
            return identity - 1.0, 1.0
        # Less in q_norm: normed queries and keys make sharp attention, which multiplies rounding errors.
        return identity - (0.5 if name.endswith("q_norm.weight") else 0.0), 0.3
    if owner is model.get_input_embeddings():
        # Gemma multiplies embeddings by sqrt(hidden); its normed writes are about 1, whatever the stream holds.
        return 0.0, 2.5 / math.sqrt(HIDDEN) if gemma else 1.0
    if isinstance(owner, torch.nn.Embedding) or owner is model.get_output_embeddings():
        return 0.0, 0.6
    inputs = parameter.shape[0] if type(owner).__name__ == "Conv1D" else parameter.shape[-1]
    return 0.0, 1 / math.sqrt(inputs)

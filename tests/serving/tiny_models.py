"""Tiny checkpoints of the families that vLLM has layers for, with random weights. Heads have 32 channels, the fewest
that vLLM attends on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

VOCABULARY = 128
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"hidden_size": 128},
    "qwen3": {},
    "qwen2_moe": {"hidden_size": 128, "num_experts": 4, "shared_expert_intermediate_size": 64, **_EXPERTS},
    "qwen3_moe": {"num_experts": 4, **_EXPERTS},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "gemma2": {"sliding_window": 256, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    "gemma3_text": {"sliding_window": 256, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    "granite": {"residual_multiplier": 0.5, "embedding_multiplier": 2.0, "attention_multiplier": 0.2},
    "deepseek_v3": {
        "head_dim": 64,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 512,  # with the channels of the rope 576, all that vLLM attends to on a CPU
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "topk_method": "noaux_tc",  # in published configs; vLLM reads the bias of the router by it
        "scoring_func": "sigmoid",
        **_EXPERTS,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 256},
    "olmo2": {},
}
_LINEAR, _FULL = "linear_attention", "full_attention"
_ALTERNATE = {"layer_types": [_LINEAR, _FULL, _LINEAR, _FULL]}
_DELTA = {
    "hidden_size": 128,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    **_ALTERNATE,
}
_SHARED = {"num_experts": 4, "shared_expert_intermediate_size": 64, **_EXPERTS}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_chunk_size": 16, "hidden_size": 128}
_CONVOLUTIONS = {  # vLLM reads conv_dim and block_dim, which published configs have, and ties embeddings as they do
    "hidden_size": 128,
    "conv_dim": 128,
    "block_dim": 128,
    "tie_word_embeddings": True,
    "layer_types": ["conv", _FULL, "conv", _FULL],
}
# Families with recurrent mixers.
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_DELTA, **_SHARED},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_SHARED},
    "nemotron_h": {
        "hidden_size": 128,
        "layers_block_type": [_LINEAR, "mlp", _FULL, "mlp", _LINEAR, "mlp", _FULL, "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "ssm_state_size": 32,
        "n_groups": 2,
        "chunk_size": 16,
    },
    "granitemoehybrid": {
        **_MAMBA,
        **_ALTERNATE,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.2,
    },
    "kimi_linear": {
        "hidden_size": 128,
        "num_key_value_heads": 4,
        "linear_head_dim": 32,
        "linear_num_heads": 4,
        "head_dim": 64,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 16,
        "v_head_dim": 32,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 64,
        **_ALTERNATE,
    },
    "falcon_h1": {
        **_MAMBA,
        "mamba_d_ssm": 256,
        "attention_in_multiplier": 0.5,
        "attention_out_multiplier": 2.0,
        "ssm_in_multiplier": 2.0,
        "ssm_out_multiplier": 0.5,
        "ssm_multipliers": [1.5, 0.5, 0.75, 1.25, 2.0],
    },
    "lfm2": {**_CONVOLUTIONS, "intermediate_size": 256},
    "lfm2_moe": {**_CONVOLUTIONS, "num_dense_layers": 1, "num_experts": 4, **_EXPERTS},
}
# Those of them whose originals vLLM 0.32 runs on a CPU in fp32 with transformers' tokens.
HYBRIDS_HERE = ("granitemoehybrid", "falcon_h1", "nemotron_h")
# Sizes that other numbers of ranks divide, by family@ranks.
_OF_RANKS: dict[str, dict[str, Any]] = {
    "llama@3": {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 192, "vocab_size": 192},
}


def write(family: str, directory: Path, **changes: Any) -> Path:
    """A checkpoint of this family in fp32, in `directory`; `changes` are of its config."""
    name = family.partition("@")[0]
    config = CONFIG_MAPPING[name](**_COMMON | (FAMILIES | HYBRIDS)[name] | _OF_RANKS.get(family, {}) | changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif parameter.dim() > 1:  # blocks that add as much as they find, so that their wiring shows
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(directory)
    return directory

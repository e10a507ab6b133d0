"""Tiny models of seven families whose heads, groups and widths few numbers of ranks divide, for `fit_ranks`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import zoo
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_COMMON: dict[str, Any] = {
    "vocab_size": 250, "hidden_size": 48, "intermediate_size": 104, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 192, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
CONFIGS: Mapping[str, dict[str, Any]] = {
    "llama": {},
    # a bias of queries, keys and values, and one in the output projection
    "qwen3": {"num_attention_heads": 10, "attention_bias": True, "tie_word_embeddings": True},
    "qwen3_moe": {"num_attention_heads": 10, **_EXPERTS},
    "qwen3_next": {
        "num_attention_heads": 10, **_EXPERTS, "shared_expert_intermediate_size": 40, "num_hidden_layers": 4,
        "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    },
    "gemma3_text": {
        "num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": 9, "query_pre_attn_scalar": 11,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "tie_word_embeddings": True,
        "final_logit_softcapping": 20.0,
    },
    "gpt_oss": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 40, "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "deepseek_v3": {
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": None, "n_routed_experts": 8, "n_group": 2,
        "num_experts_per_tok": 2, "topk_group": 1, "moe_intermediate_size": 24, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "v_head_dim": 8,
    },
}  # fmt: skip
FAMILIES = tuple(CONFIGS)
WASTE = {"fit_ranks.waste": "100000%"}  # sizes are small, and padding many times as large
ROWS, LENGTH, TOKENS = 8, 13, 64


def build(family: str, **changes: Any) -> PreTrainedModel:
    """A model with large random weights, fp32, eager."""
    settings = {**_COMMON, **CONFIGS[family], **changes}
    config = AutoConfig.for_model(family, **{name: v for name, v in settings.items() if v is not None})
    config.eos_token_id = None
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    zoo.randomize(model, seed=0)
    return model.eval()


def save(family: str, directory: Path, **changes: Any) -> PreTrainedModel:
    """`build`, saved in `directory`."""
    model = build(family, **changes)
    model.save_pretrained(directory)
    return model


def ids(length: int = 33) -> torch.Tensor:
    """int64 [2, length], beyond every window."""
    return torch.randint(2, 250, (2, length), generator=torch.Generator().manual_seed(length))


@torch.no_grad()
def tokens(model: PreTrainedModel) -> torch.Tensor:
    """64 greedy tokens behind each of eight prompts, [8, 64]."""
    prompts = torch.randint(2, 250, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    made = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=TOKENS, do_sample=False)
    return torch.as_tensor(made)[:, LENGTH:]


@functools.cache
def of_source(family: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits for `ids()`, `tokens`) of the model that is not padded; made once."""
    model = build(family)
    with torch.no_grad():
        return model(input_ids=ids(), use_cache=False).logits, tokens(model)

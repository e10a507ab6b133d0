"""Small image-text checkpoints, built from configs with towers as deep as the text model, and pictures for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import zoo
from adapted import build_tokenizer
from tiny_corpus import BOS, EOS, PAD
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

LAYERS = 4
IMAGE, START, END = 263, 262, 261  # tokens, behind those of the tokenizer
_TEXT: dict[str, Any] = dict(
    hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    intermediate_size=64, vocab_size=264, max_position_embeddings=128, bos_token_id=BOS, eos_token_id=EOS,
    pad_token_id=PAD,
)  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
_QWEN_VISION: dict[str, Any] = dict(
    depth=LAYERS, hidden_size=32, intermediate_size=48, num_heads=2, patch_size=4, temporal_patch_size=2,
    spatial_merge_size=2, out_hidden_size=32, num_position_embeddings=16,
)  # fmt: skip
_QWEN_TOKENS = dict(image_token_id=IMAGE, vision_start_token_id=START, vision_end_token_id=END, video_token_id=260)
_CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": dict(
        text_config=_TEXT | dict(sliding_window=8),
        vision_config=dict(
            hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=2, image_size=16,
            patch_size=4,
        ),
        mm_tokens_per_image=4, image_token_index=IMAGE, boi_token_index=START, eoi_token_index=END,
    ),
    "qwen3_5": dict(
        text_config=_TEXT | dict(
            layer_types=[*["linear_attention"] * (LAYERS - 1), "full_attention"], rope_parameters=_ROPE,
            linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
        ),
        vision_config=_QWEN_VISION, **_QWEN_TOKENS,
    ),
    "qwen3_vl": dict(
        text_config=_TEXT | dict(rope_parameters={**_ROPE, "partial_rotary_factor": 1.0, "mrope_section": [4, 2, 2]}),
        vision_config=_QWEN_VISION | dict(deepstack_visual_indexes=[1]), **_QWEN_TOKENS,
    ),
}  # fmt: skip


def config(family: str) -> Any:
    """The config of a family, as a checkpoint has it."""
    return AutoConfig.for_model(family, **_CONFIGS[family])


def save(family: str, directory: Path, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """A checkpoint with random weights, a tokenizer, and files of a processor."""
    model = AutoModelForImageTextToText.from_config(config(family), dtype=torch.float32)
    zoo.randomize(model, seed=seed)
    model.to(dtype).save_pretrained(directory)
    build_tokenizer(64).save_pretrained(directory)
    for name in ("preprocessor_config.json", "processor_config.json"):
        (directory / name).write_text(json.dumps({"of": family}))
    return directory


def load(directory: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model as users of transformers load it, in eval mode, with eager attention."""
    options = {"attn_implementation": "eager", "dtype": dtype, "trust_remote_code": True}
    return AutoModelForImageTextToText.from_pretrained(directory, **options).eval()


def inputs(family: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A row of text with one random picture in it, as the family's processor makes it."""
    draw = torch.Generator().manual_seed(seed)
    gemma = family == "gemma3"
    count = 4 if gemma else 8
    ids = torch.tensor([[BOS, 40, 41, START, *[IMAGE] * count, END, 42, 43, 44]])
    pixels = torch.randn((1, 3, 16, 16) if gemma else (32, 3 * 2 * 4 * 4), generator=draw).to(dtype)
    kinds = {"token_type_ids" if gemma else "mm_token_type_ids": (ids == IMAGE).long()}
    grid = {} if gemma else {"image_grid_thw": torch.tensor([[1, 4, 8]])}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels, **kinds, **grid}

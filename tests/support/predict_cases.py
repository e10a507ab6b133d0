"""Small configs and comparisons by name, for tests of predictions."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig

from rewriter.predict.results import RecipeComparison


def small_config(**changes: Any) -> LlamaConfig:
    sizes: dict[str, Any] = dict(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=8,
        vocab_size=512, max_position_embeddings=4096, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    return LlamaConfig(**{**sizes, **changes})


def by_name(comparison: RecipeComparison) -> dict[str, Any]:
    return {p.recipe: p for p in comparison.predictions}

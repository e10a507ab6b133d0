"""The cache of a prompt whose tokens are rewired, for whatever computes what follows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from rewriter.common.cache_names import cache_argument
from rewriter.ir.phases import PromptPhase


@torch.no_grad()
def cached_prompt(prompts: Any, following: Any, ids: Tensor) -> tuple[int, dict[str, Any]]:
    """(tokens in the cache, the cache by the name of the argument by which `following` takes it): `prompts`, a model
    that rewires the prompt alone, computes `ids` (int64 [1, S], a prompt) up to its last rewired token, and of a short
    one its first."""
    phase = PromptPhase(**prompts.config.rewriter_phase)
    end = max(1, ids.shape[1] - phase.exact_tail)
    cached = {cache_argument(following): DynamicCache(config=following.config)}
    prompts(ids[:, :end], rewired=phase.rewired(ids.shape[1])[:, :end].to(ids.device), use_cache=True, **cached)
    return end, cached

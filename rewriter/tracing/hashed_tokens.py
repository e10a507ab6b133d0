"""Embeddings of n-grams: tables with a row for each hash of a token and those before it (Qwen 4 Exp's embeddings per
layer; Over-Tokenized Transformer, arXiv 2501.16975).

The modules keep earlier tokens in a cache of their own, and look for the last end of a sequence among all of them. They
are traced as what they compute of each token and the n - 1 before it, where that gives their values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_MODULE = ("ngram_embedding", "layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets", "context_len")


def hashed_tokens(model: nn.Module) -> dict[nn.Module, Callable[..., Tensor]]:
    """By module of `model` that embeds n-grams, its forward over windows of tokens."""
    return {
        module: _embedded(module)
        for module in model.modules()
        if all(hasattr(module, name) for name in _MODULE) and _agrees(module)
    }


def _embedded(module: Any) -> Callable[..., Tensor]:
    def forward(input_ids: Tensor, *_: Any, **__: Any) -> Tensor:
        return module.ngram_embedding(_rows(module, input_ids.long())).flatten(-2)

    return forward


def _rows(module: Any, ids: Tensor) -> Tensor:
    """The rows [B, S, heads] of n-grams, n = 2, 3, ..., of token ids [B, S].

    Ids are counted from that of the end of a sequence, so that 0 stands for it, and for what is before the first token.
    """
    end, longest, heads = module.eos_token_id, module.context_len, module.heads_per_ngram
    behind = F.pad((ids - end).unsqueeze(1), (longest, 0)).squeeze(1)
    mixed = ids * module.layer_multipliers[0]
    nearer: Tensor | None = None
    rows = []
    for distance in range(1, longest + 1):
        token = behind[:, longest - distance : -distance]
        nearer = token if nearer is None else token.masked_fill(nearer == 0, 0)
        mixed = torch.bitwise_xor(mixed, (nearer + end) * module.layer_multipliers[distance])
        own = slice((distance - 1) * heads, distance * heads)
        rows.append(mixed.unsqueeze(-1) % module.ngram_heads_vocab_sizes[own] + module.ngram_heads_offsets[own])
    return torch.cat(rows, -1)


def _agrees(module: Any) -> bool:
    """True if `module` takes the same rows of its table, of tokens of which many end a sequence."""
    draw = torch.Generator().manual_seed(0)
    try:
        real = copy.copy(module)
        real._buffers, real._modules = dict(module._buffers), {}
        for name, most in (("layer_multipliers", 2**20), ("ngram_heads_vocab_sizes", 50), ("ngram_heads_offsets", 50)):
            setattr(real, name, torch.randint(1, most, getattr(module, name).shape, generator=draw))
        real.ngram_embedding = nn.Embedding(100, 2)
        end = real.eos_token_id
        ids = torch.randint(max(end - 2, 0), end + 3, (3, 40), generator=draw)
        with torch.no_grad(), torch.device("cpu"):
            return torch.equal(real(ids, None), _embedded(real)(ids))
    except Exception:  # a model's own code, on values of ours
        return False

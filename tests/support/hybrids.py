"""Small models with recurrent mixers, of the types that people run, and what transformers generates with them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from transformers import PreTrainedModel

from rewriter.check.coverage.configs import small_config
from rewriter.check.random_model import build_model, randomize
from rewriter.ir import Program
from rewriter.tracing import trace

# The types whose blocks ranks share in full, by what mixes their tokens beside attention.
TYPES = {
    "qwen3_next": "gated delta rule, experts",
    "qwen3_5_text": "gated delta rule",
    "qwen3_5_moe_text": "gated delta rule, experts",
    "kimi_linear": "delta rule with a decay per channel, latent attention, experts",
    "nemotron_h": "Mamba 2, experts without a gate",
    "granitemoehybrid": "Mamba 2, experts",
    "falcon_h1": "Mamba 2 beside attention in every layer",
    "lfm2_moe": "short convolutions, experts",
}
# transformers' step of Mamba 2 ignores the limits of Δ, which this type's default config sets: it is recomputed.
WRONG_STEPS = ("nemotron_h",)
OTHERS = (
    "lfm2",
    "mamba",
    "mamba2",
    "falcon_mamba",
    "jamba",
    "bamba",
    "zamba2",
    "olmo_hybrid",
    "bailing_hybrid",
    "lfm3",
    "recurrent_gemma",
    "minimax",
    "zamba",
    "inkling_text",
    "doge",  # no mixer, but keeps a bias of every key
    "zaya",
)


@cache
def model(name: str, strength: float = 0.5) -> PreTrainedModel:
    """An eager fp32 model with random weights, whose mixers, heads and groups four ranks can share."""
    made = build_model(small_config(name))
    randomize(made, strength)
    return made


@cache
def traced(name: str) -> Program:
    return trace(small_config(name))


def weights(name: str) -> dict[str, torch.Tensor]:
    return weights_of(model(name))


def weights_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters and stored buffers by name, detached."""
    return {n: p.detach() for n, p in {**dict(model.named_buffers()), **dict(model.named_parameters())}.items()}


def prompts(vocabulary: int) -> list[list[int]]:
    """Eight prompts of four lengths, two of them longer than a chunk of 64 tokens."""
    draw = torch.Generator().manual_seed(7)
    lengths = (1, 3, 3, 9, 9, 23, 70, 70)
    return [torch.randint(3, vocabulary, (n,), generator=draw).tolist() for n in lengths]


@torch.no_grad()
def generated(name: str, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """`count` greedy tokens of each prompt by transformers, rows of one length at a time; no token ends a text."""
    source, found = model(name), {}
    source.generation_config.eos_token_id = None
    for length in {len(p) for p in prompts}:
        rows = [i for i, p in enumerate(prompts) if len(p) == length]
        ids = torch.tensor([prompts[i] for i in rows])
        options = {"attention_mask": torch.ones_like(ids), "use_cache": name not in WRONG_STEPS}
        made = source.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0, **options)
        found |= dict(zip(rows, made[:, length:].tolist(), strict=True))
    return [found[i] for i in range(len(prompts))]

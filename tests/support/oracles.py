"""Independent references: what a rewritten model must compute, said in a few lines on the unmodified eager model.

Nothing here imports `rewriter`. A ladder changes only what each block *reads*. Number the blocks of a model in order
(attention 0, MLP 0, attention 1, ...; a parallel attention+MLP layer is one block), let X_0 be the embedding and

    X_{j+1} = X_j + block_j(read_j)

Standard:           read_j = X_j.
Block of a ladder layer:  read_j = X_{j-1}, with X_{-1} := X_0: it misses exactly the block before it.

Both transitions follow without a further rule. The first ladder attention after a standard layer reads that layer's
post-attention residual; the first standard block after a ladder layer reads everything. Alg. 1 of the Ladder Residual
paper is the same function written with pending sums; test_oracles.py checks that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

# The first module of each block of a layer: what it is given is the residual stream. OLMo2 has no entry norm.
_ENTRIES = {
    "llama": ("input_layernorm", "post_attention_layernorm"),
    "mistral": ("input_layernorm", "post_attention_layernorm"),
    "qwen2": ("input_layernorm", "post_attention_layernorm"),
    "qwen3": ("input_layernorm", "post_attention_layernorm"),
    "mixtral": ("input_layernorm", "post_attention_layernorm"),
    "qwen3_moe": ("input_layernorm", "post_attention_layernorm"),
    "gpt_neox": ("input_layernorm", "post_attention_layernorm"),
    "gpt2": ("ln_1", "ln_2"),
    "gemma2": ("input_layernorm", "pre_feedforward_layernorm"),
    "gemma3_text": ("input_layernorm", "pre_feedforward_layernorm"),
    "olmo2": ("self_attn", "mlp"),
}


def layers_of(model: PreTrainedModel) -> torch.nn.ModuleList:
    """The decoder layers of a causal LM of the zoo."""
    return model.base_model.h if model.config.model_type == "gpt2" else model.base_model.layers


def is_parallel(model: PreTrainedModel) -> bool:
    """Whether attention and MLP of a layer read the same stream and are added together: one block per layer."""
    return bool(getattr(model.config, "use_parallel_residual", False))


def _blocks(model: PreTrainedModel) -> Iterator[tuple[int, list[torch.nn.Module]]]:
    """Per block, in order: the number of its layer and the modules that read the stream for it."""
    for number, layer in enumerate(layers_of(model)):
        entries = [getattr(layer, name) for name in _ENTRIES[model.config.model_type]]
        if is_parallel(model):
            yield number, entries
        else:
            yield from ((number, [entry]) for entry in entries)


@contextmanager
def ladder_oracle(model: PreTrainedModel, layers: Collection[int]) -> Iterator[PreTrainedModel]:
    """Within the `with`, `model` is the ladder of itself on `layers`: forward, backward, `generate` with its cache.

    The model's own code runs throughout; hooks hand each ladder block the stream that the block before it was given.
    Raises KeyError for a model type that is not in the zoo, ValueError for a layer that the model does not have.
    """
    if surplus := set(layers) - set(range(len(layers_of(model)))):
        raise ValueError(f"layers {sorted(surplus)}: the model has {len(layers_of(model))}")
    streams: dict[int, torch.Tensor] = {}

    def reads(block: int, stale: bool) -> Callable[..., Any]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            positional = bool(args)
            streams[block] = args[0] if positional else kwargs["hidden_states"]
            read = streams[max(block - 1, 0)] if stale else streams[block]
            return ((read, *args[1:]), kwargs) if positional else (args, kwargs | {"hidden_states": read})

        return hook

    handles = [
        entry.register_forward_pre_hook(reads(block, layer in layers), with_kwargs=True)
        for block, (layer, entries) in enumerate(_blocks(model))
        for entry in entries
    ]
    try:
        yield model
    finally:
        for handle in handles:
            handle.remove()
        streams.clear()


@torch.no_grad()
def ladder_logits(
    model: PreTrainedModel,
    layers: Collection[int],
    input_ids: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits (batch, sequence, vocabulary) of the ladder of `model` on `layers`, without a cache.

    `input_ids` and `position_ids` are int64 (batch, sequence); `layers` empty gives the original model.
    """
    with ladder_oracle(model, layers):
        return model(
            input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask, use_cache=False
        ).logits


@torch.no_grad()
def greedy_oracle(
    forward: Callable[[torch.Tensor], torch.Tensor], prompts: Sequence[Sequence[int]], n: int
) -> list[list[int]]:
    """The next `n` greedy tokens of each prompt, everything recomputed for every token: no cache, no masks.

    `forward` maps token ids (batch, sequence) to logits (batch, sequence, vocabulary). The prompts of a batch are
    filled up on the *right*, which a causal model cannot see.
    """
    length = max(map(len, prompts))
    ids = torch.tensor([[*prompt, *[prompt[0]] * (length + n - len(prompt))] for prompt in prompts])
    ends = torch.tensor([len(prompt) for prompt in prompts])
    rows = torch.arange(len(prompts))
    for _ in range(n):
        logits = forward(ids[:, : int(ends.max())])
        ids[rows, ends] = logits[rows, ends - 1].argmax(-1)
        ends = ends + 1
    return [ids[row, end - n : end].tolist() for row, end in enumerate(ends.tolist())]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over largest expected magnitude, taken in float64. Infinite where shapes or NaNs disagree."""
    if actual.shape != expected.shape or not bool(actual.isfinite().all()):
        return float("inf")
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max())

"""Models with random weights that make a wrong rewrite show: all random, and blocks that write as much as they read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from rewriter.check.comparison import relative_error
from rewriter.check.stream_hooks import decoder_layers
from rewriter.common.errors import RewriterError
from rewriter.common.model_class import auto_class
from rewriter.common.text_settings import special_tokens
from rewriter.tracing.shrink import text_config

# How every model that is compared is built or loaded: plain attention and experts one by one, in fp32.
EAGER: Mapping[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}


def random_ids(config: PreTrainedConfig, length: int, rows: int = 2) -> torch.Tensor:
    """int64 [rows, length], the same for the same length; tokens that stand for padding do not occur."""
    text = text_config(config)
    vocabulary = getattr(text, "vocab_size", None) or config.vocab_size
    ids = torch.randint(2, vocabulary, (rows, length), generator=torch.Generator().manual_seed(length))
    for token in special_tokens(config.to_dict()).values():  # of images, of which there are none
        ids = ids.masked_fill(ids == token, 3)
    padding = getattr(text, "pad_token_id", None)
    return ids if padding is None else ids.masked_fill(ids == padding, 1 if padding != 1 else 0)


def random_model(config: PreTrainedConfig, strength: float = 1.0, trust_remote_code: bool = False) -> PreTrainedModel:
    """An eager fp32 model in eval mode with large random weights: a stream of about 1, blocks that write as much.

    Norms and biases are random too, so that one that is skipped, doubled or exchanged shows.
    """
    try:
        model = build_model(config, trust_remote_code)
    except Exception as error:  # constructors of models may raise any error
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RewriterError(
            f"model type {config.model_type!r} has no shrunken check: its shrunken copy cannot be built ({text}). "
            "Use --verify full or none"
        ) from error
    randomize(model, strength)
    return model


def build_model(config: PreTrainedConfig, trust_remote_code: bool = False) -> PreTrainedModel:
    """The eager fp32 model of `config` in eval mode, as its class initialises it; raises what that raises."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        options = {**EAGER, "trust_remote_code": trust_remote_code}
        model: PreTrainedModel = auto_class(config).from_config(config, **options)
    return model.eval()


def save_model(model: PreTrainedModel, config: PreTrainedConfig, directory: Path) -> None:
    """Save `model` as the checkpoint that it is of `config`: some models keep a config inside that one as their own."""
    model.save_pretrained(directory)
    if type(model.config) is not type(config):
        config.save_pretrained(directory)


@torch.no_grad()
def randomize(model: PreTrainedModel, strength: float = 1.0) -> None:
    """Overwrite the weights of `model`; what blocks write grows with `strength`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            _randomize(model, name, parameter, strength)
        stored = model.state_dict().keys()
        for name, buffer in model.named_buffers():
            if name in stored and not buffer.any():
                _fill(buffer, model.get_submodule(name.rpartition(".")[0]))
    _calibrate(model)


@torch.no_grad()
def amplification(model: PreTrainedModel, config: PreTrainedConfig, length: int) -> float:
    """Factor by which a relative error of 1e-6 in the embeddings grows in the logits of `length` random tokens."""
    embedding, ids = model.get_input_embeddings().weight, random_ids(config, length)
    kept, noise = embedding.clone(), torch.randn(embedding.shape, generator=torch.Generator().manual_seed(0))
    expected = model(input_ids=ids, use_cache=False).logits
    embedding.mul_(1 + 1e-6 * noise)
    actual = model(input_ids=ids, use_cache=False).logits
    embedding.copy_(kept)
    return relative_error(actual, expected) / 1e-6


@torch.no_grad()
def _randomize(model: PreTrainedModel, name: str, parameter: torch.Tensor, strength: float) -> None:
    noise = torch.randn(parameter.shape)
    if parameter.ndim < 2:
        # Around what initialisation gave: norms that multiply by the weight hold 1, by 1 + weight 0.
        parameter.add_(noise * (0.15 if name.endswith("bias") else 0.3))
        return
    owner = model.get_submodule(name.rpartition(".")[0])
    if isinstance(owner, torch.nn.Embedding) or owner is model.get_output_embeddings():
        parameter.copy_(noise)
        return
    inputs = parameter.shape[0] if type(owner).__name__ == "Conv1D" else parameter.shape[-1]
    parameter.copy_(noise * strength / math.sqrt(inputs))


def _fill(buffer: torch.Tensor, owner: torch.nn.Module) -> None:
    """Numbers for a buffer that is stored and zero at first: a bias that training moves without gradients, as routers
    have; a table of each token's experts, int [vocabulary, experts per token], whose rows get different ones."""
    experts = getattr(owner, "num_experts", None)
    if buffer.is_floating_point():
        buffer.add_(torch.randn(buffer.shape) * 0.15)
    elif buffer.ndim == 2 and isinstance(experts, int) and buffer.shape[1] <= experts:
        buffer.copy_(torch.rand(buffer.shape[0], experts).argsort(1)[:, : buffer.shape[1]])


@torch.no_grad()
def _calibrate(model: PreTrainedModel) -> None:
    """Scale the embeddings so that the first layer gets a stream of about 1, after all factors before it."""
    seen: list[float] = []

    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        seen.append(float(hidden.pow(2).mean().sqrt()))

    with decoder_layers(model)[0].register_forward_pre_hook(hook, with_kwargs=True):
        model(input_ids=random_ids(model.config, 21), use_cache=False)
    if seen and math.isfinite(seen[0]) and seen[0] > 0:
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                module.weight.mul_(1 / seen[0])

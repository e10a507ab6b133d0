"""Weights of the prompt's own: fitted so that the keys and values of rewired tokens are those of the original.

An instance that serves prompts alone computes them, and hands its cache to one that runs the original. Nothing is
generated with these weights, so that what they are compared by are the keys and values that a cache holds, those of
each rewritten layer alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from rewriter.adapt.models import Batch, Model, TokenStates, Trunk, base_of, first_rewritten, layers_of
from rewriter.adapt.objective import Loss
from rewriter.adapt.prompts import Row
from rewriter.common.cache_names import cache_argument
from rewriter.common.errors import RewriterError
from rewriter.ir.phases import REWIRED
from rewriter.runtime.replicas import IGNORED, next_tokens

KeysAndValues = list[tuple[Tensor, Tensor]]
"""Of each layer that keeps some, [B, H, S, D], as its cache holds them."""


def require_keys(config: Any) -> None:
    """Raise RewriterError for a model of transformers whose layers keep anything but keys and values."""
    text = config.get_text_config(decoder=True)
    kinds = {type(layer) for layer in DynamicCache(config=text).layers}
    other = next((kind.__name__ for kind in kinds if not issubclass(kind, DynamicLayer)), None)
    if other is not None:
        raise RewriterError(
            f"--prompt-weights: {config.model_type} has layers that keep a state of another kind ({other}), and keys "
            "and values are compared. Heal one set of weights for both phases: leave out --prompt-weights"
        )


def keys_and_values(module: nn.Module, ids_BS: Tensor, rewired_BS: Tensor | None, cache: Any = None) -> KeysAndValues:
    """The cache that a causal LM of transformers leaves of the tokens `ids_BS`, int64; layers without any are left
    out. `rewired_BS` (bool) for a model that rewires some tokens alone."""
    cache = DynamicCache() if cache is None else cache
    body = cast(Any, base_of(module).base_model)
    told = {} if rewired_BS is None else {REWIRED: rewired_BS}
    body(input_ids=ids_BS, use_cache=True, **{cache_argument(body): cache}, **told)
    return [(layer.keys, layer.values) for layer in cache.layers if getattr(layer, "keys", None) is not None]


def fitting(theirs: nn.Module, trunk: Trunk | None, autocast: Callable[[], AbstractContextManager[None]]) -> Loss:
    """The loss of keys and values beside those of the original, `theirs`: `key_errors`, the mean over the rewritten
    layers, of each row as often as it has targets."""

    def loss(student: Model, batch: Batch, module: nn.Module) -> dict[str, Tensor]:
        first = first_rewritten(student.module)
        with torch.no_grad(), autocast(), contextlib.nullcontext() if trunk is None else trunk.kept():
            wanted = keys_and_values(theirs, batch["input_ids"], None)
        with autocast(), contextlib.nullcontext() if trunk is None else trunk.given():
            made = keys_and_values(student.module, batch["input_ids"], batch[REWIRED])
        above = min(len(layers_of(student.module)) - first, len(made))  # layers may share keys, or be taken over
        errors_B = key_errors(made[-above:], wanted[-above:], valid_tokens(batch))
        counted_B = (next_tokens(batch["labels"]) != IGNORED).sum(1)
        return {"loss": (errors_B * counted_B).sum()}

    return loss


def valid_tokens(batch: Batch) -> Tensor:
    """bool [B, S]: tokens of the rows' examples, of which each has its own row; padding is another segment."""
    return batch["segment_ids"] == 0


def key_errors(made: KeysAndValues, wanted: KeysAndValues, valid_BS: Tensor) -> Tensor:
    """fp32 [B]: the squared error of keys and of values over their squares, over the valid tokens of a row, as the mean
    over layers and both."""
    valid = valid_BS[:, None, :, None]
    errors = [
        ((ours.float() - theirs.float()).square() * valid).sum((1, 2, 3))
        / (theirs.float().square() * valid).sum((1, 2, 3)).clamp(min=1e-12)
        for pair, other in zip(made, wanted, strict=True)
        for ours, theirs in zip(pair, other, strict=True)
    ]
    return torch.stack(errors).mean(0)


class Prefilled:
    """The original, reading keys and values of a prompt that another model left: a row is computed by the one up to its
    last rewired token, and by the original from there on."""

    def __init__(self, prompts: Model, original: Model) -> None:
        self.prompts, self.original = prompts, original
        self.module, self.group = prompts.module, prompts.group

    def __call__(self, batch: Batch, module: nn.Module | None = None) -> TokenStates:
        rows = [
            self._row({name: value[i : i + 1] for name, value in batch.items()}) for i in range(len(batch["labels"]))
        ]
        states = torch.cat(rows)
        return TokenStates(states, torch.arange(states.shape[1], device=states.device))

    def _row(self, row: Row) -> Tensor:
        """Logits [1, S, V], 0 for tokens that the original does not compute."""
        ids, rewired = row["input_ids"], row[REWIRED]
        found = torch.nonzero(rewired[0])
        end = int(found[-1]) + 1 if len(found) else 0
        cache = DynamicCache()
        if end:
            keys_and_values(self.prompts.module, ids[:, :end], rewired[:, :end], cache)
        model = cast(Any, base_of(self.original.module))
        given = {cache_argument(model): cache, "use_cache": True}
        logits: Tensor = model(input_ids=ids[:, end:], **given).logits
        return torch.cat([logits.new_zeros(1, end, logits.shape[2]), logits], 1)

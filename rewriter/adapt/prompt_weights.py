"""Weights of the prompt's own: fitted so that the keys and values of rewired tokens are those of the original.

An instance that serves prompts alone computes them, and hands its cache to one that runs the original. Nothing is
generated with these weights, so that what they are compared by are the keys and values that a cache holds, those of
each rewritten layer alike.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from rewriter.adapt.models import Batch, Model, TokenStates, base_of
from rewriter.adapt.prompts import Row
from rewriter.common.cache_names import cache_argument
from rewriter.common.errors import RewriterError
from rewriter.ir.phases import REWIRED

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

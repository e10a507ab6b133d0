"""Numbers of a config that no model can have: refused by name, before anything is built with them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from rewriter.common.errors import RewriterError, shortened

MOST_LAYERS = 10_000
LARGEST = 1 << 24  # of a layer, a vocabulary, a number of heads or experts: a hundred times those of any model known

# As transformers calls them in every config; a list has a number per layer.
_SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size")
_BASES = ("rope_theta", "rotary_emb_base", "rope_local_base_freq")
_FACTORS = ("factor", "long_factor", "short_factor")  # of positions, which are divided by them
_Place = tuple[str, ...]


def check_numbers(file: str | Path, config: Mapping[str, Any]) -> None:
    """Raise RewriterError, naming file and key, for a NaN, an epsilon below 0, and a rotary base or factor that is not
    above 0."""
    for place, value in _floats(config):
        name = place[-1]
        if math.isnan(value):
            wrong = "expected a number"
        elif name.endswith(_BASES) and not 0 < value < math.inf:
            wrong = "expected a base above 0"
        elif name in _FACTORS and place[0].startswith("rope") and not 0 < value < math.inf:
            wrong = "expected a factor above 0"
        elif name.endswith(("_eps", "epsilon")) and not 0 <= value < math.inf:
            wrong = "expected a small number, 0 or more"
        else:
            continue
        raise RewriterError(f"{file}: {'.'.join(place)} is {value}, {wrong}. Correct it, or download the file again.")


def check_dtypes(file: str | Path, config: Mapping[str, Any]) -> None:
    """Raise RewriterError, naming file and key, for a `dtype` that transformers cannot read, also of a model inside."""
    for name in ("dtype", "torch_dtype"):
        value = config.get(name)
        if isinstance(value, str) and not isinstance(getattr(torch, value, None), torch.dtype):
            raise RewriterError(f"{file}: {name} is {value!r}, expected a name such as 'bfloat16'. Correct it.")
    for inner in config.values():
        if isinstance(inner, Mapping):
            check_dtypes(file, inner)


def check_sizes(config: PreTrainedConfig) -> None:
    """Raise RewriterError, naming the key, for sizes below 1, and for those that no machine could hold."""
    text = config.get_text_config(decoder=True)
    values = text.to_dict()  # the attributes of some types cannot be asked for
    for name in ("num_hidden_layers", *_SIZES):
        written = text.attribute_map.get(name, name)
        given = values.get(written)
        most = MOST_LAYERS if name == "num_hidden_layers" else LARGEST
        for value in given if isinstance(given, list | tuple) else [given]:
            if isinstance(value, int) and not isinstance(value, bool) and not 1 <= value <= most:
                raise RewriterError(
                    f"config of model type {config.model_type!r}: {written} is {shortened(value, 30)}, "
                    f"expected 1 to {most:,}. Correct it, or download the config again."
                )


def _floats(config: Mapping[str, Any], place: _Place = ()) -> Iterator[tuple[_Place, float]]:
    """Every number of a config with its place, those of a list at the place of the list."""
    for name, found in config.items():
        for value in found if isinstance(found, list) else [found]:
            if isinstance(value, Mapping):
                yield from _floats(value, (*place, name))
            elif isinstance(value, int | float) and not isinstance(value, bool):
                yield (*place, name), min(value, 1 << 1000) if isinstance(value, int) else value

"""A real model's config, shrunken: few layers and small sizes, but the same kinds of layers, heads and transitions.

What decides how a model is traced, split and rewired is kept: whether sizes divide by the number of ranks, whether
query heads share key/value heads, whether ranks share them, partial rotary, latent attention, experts, every layer
type, ties, biases, norms, soft-caps. What only makes it big is not: widths, vocabulary, depth, window lengths (the
names of these settings are in `shrink_sizes`). Encoders next to the text model (vision, audio) become small as well.

Layer selections name layers of the real model, so layers are not renumbered by a rule of three. `representatives`
picks real layers: the first two and the last two, every kind of layer (its type in the config, and which passes select
it), and around each kind of border between unlike neighbours the two layers on either side. Layer j of the copy
stands for the j-th of them, and a pass that selects layers selects their places. A pick of `upper-half` of 80 layers is
[0, 1, 38, 39, 40, 41, 78, 79], selected [4, 5, 6, 7]: the same standard → ladder transition, the same end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import lcm
from typing import Any

from transformers import PreTrainedConfig

from rewriter.common.errors import RewriterError
from rewriter.common.shrink_sizes import HEADS, HIDDEN, LAYERS, shrunken_sizes
from rewriter.common.text_settings import ON_LOAD, without_quantization
from rewriter.tracing.shrink_beside import fitted, grids_inside, shrunken_beside, tokens_inside

_LISTS_OF_LAYERS = (
    "mlp_only_layers", "moe_layers", "dense_layers", "full_attn_idxs", "cross_attention_layers", "attn_layer_indices",
    "hybrid_layer_ids",
)  # fmt: skip
_FIRST_LAYERS = ("first_k_dense_replace", "num_dense_layers", "max_window_layers")
_LAST_LAYERS = ("num_kv_shared_layers",)
_KEYED_BY_LAYER = ("per_layer_config",)
_SOURCES = ("kv_source_layers",)  # for each layer, the one whose keys and values it reads
_STEPS = (
    "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq", "no_rope_layer_interval",
    "full_attention_interval", "sliding_window_pattern", "global_attn_every_n_layers", "expert_layer_period",
    "attn_layer_period", "moe_every_n_layers",
)  # fmt: skip


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the language model inside `config`, which may be `config` itself."""
    if hasattr(config, "global_config"):  # the language model between a byte encoder and decoder
        return config.global_config
    # A text encoder next to it (music generation) is not what is generated from.
    return config.get_text_config(decoder=True) if hasattr(config, "text_encoder") else config.get_text_config()


def depth(config: PreTrainedConfig) -> int:
    """Number of decoder layers. Raises RewriterError when the config does not say."""
    text = text_config(config)
    # Some types compute it, and do not store it; or compute another number, of sublayers, beside the one they store.
    computed = [name for name in LAYERS if isinstance(getattr(type(text), name, None), property)]
    names = [*(name for name in LAYERS if name not in computed), *computed]
    count = next((value for name in names if isinstance(value := getattr(text, name, None), int)), None)
    if count is None:
        raise RewriterError(
            f"model type {config.model_type!r}: its config names no number of layers, so it cannot be shrunken"
        )
    return int(count)


def representatives(config: PreTrainedConfig, selections: Sequence[Collection[int]]) -> list[int]:
    """The layers of the real model that the copy keeps, ascending: see this module's docstring."""
    table, count = text_config(config).to_dict(), depth(config)
    per_layer = [
        value
        for name, value in table.items()
        if isinstance(value, (list, tuple)) and len(value) == count > 4 and name not in (*_LISTS_OF_LAYERS, *_SOURCES)
    ]
    sources = [table[name] for name in _SOURCES if isinstance(table.get(name), list)]
    per_layer += [[(values[i] == i, i in values[i + 1 :]) for i in range(count)] for values in sources]
    kinds: list[tuple[Any, ...]] = [
        (*(i in chosen for chosen in selections), *(repr(values[i]) for values in per_layer), *_listed(table, i))
        for i in range(count)
    ]
    kept = {0, 1, count - 2, count - 1}
    seen: set[Any] = set()
    for i, kind in enumerate(kinds):
        border = (kinds[i - 1], kind) if i else None
        if kind not in seen:
            kept.add(i)
        if border is not None and border[0] != border[1] and border not in seen:
            kept |= {i - 2, i - 1, i, i + 1}
        seen |= {kind, border}
    step = max((table[name] for name in _STEPS if isinstance(table.get(name), int) and table[name] <= 8), default=1)
    kept |= set(range(step))  # types by remainder: the first period stays where it is
    kept = {i for i in kept if 0 <= i < count}
    return sorted(kept | {values[i] for values in sources for i in kept})


def _listed(table: Mapping[str, Any], layer: int) -> tuple[bool, ...]:
    named = tuple(layer in table[n] for n in _LISTS_OF_LAYERS if isinstance(table.get(n), list))
    return named + tuple(layer < table[n] for n in _FIRST_LAYERS if isinstance(table.get(n), int))


def shrink(
    config: PreTrainedConfig,
    layers: Sequence[int],
    ranks: int = 1,
    changes: Mapping[str, Any] | None = None,
    *,
    exchanged: int = 1,
) -> PreTrainedConfig:
    """A small config of the same kind, with one layer for each of `layers` of the real one, for `ranks` ranks.

    Its heads divide by `ranks` · `exchanged` where the real ones do: `exchanged` sequence-parallel ranks share the
    heads of a tensor-parallel one. `changes` are settings to put last, by name; `text_config.head_dim` names one of a
    config inside. Raises RewriterError when the result is no valid config of its type.
    """
    table = config.to_dict()
    text = text_config(config)
    inner = next((k for k, v in config.__dict__.items() if v is text), None) if text is not config else None
    whole = table if inner is None else table[inner]
    small = _shrink_table(dict(whole), layers, depth(config), ranks, exchanged)
    beside = {name: value for name, value in table.items() if name != inner}
    data = {name: shrunken_beside(value, small, _shrink_tower) for name, value in beside.items()}
    if inner is None:
        data = small | {name: value for name, value in data.items() if value is not table[name]}
    else:
        data = fitted(data, table, small) | grids_inside(table)
        data |= tokens_inside(table, small.get("vocab_size", 256)) | {inner: small}
    data = without_quantization(data)
    if data.pop(ON_LOAD, None):  # heads of the copy divide its width, as its class wants
        heads = lcm(*(data[name] for name in HEADS if isinstance(data.get(name), int)))
        data |= {name: -(-data[name] // heads) * heads for name in HIDDEN if isinstance(data.get(name), int)}
    if "auto_map" not in data:
        data["_name_or_path"] = ""
    data["dtype"] = "float32"
    for path, value in (changes or {}).items():
        *outer, name = path.split(".")
        place = data
        for step in outer:
            place = place[step]
        place[name] = value
    try:
        return type(config).from_dict(data)
    except Exception as error:  # validation differs by type, and may raise any error
        text_ = " ".join(str(error).split()) or type(error).__name__
        raise RewriterError(
            f"model type {config.model_type!r} cannot be shrunken: {text_}. Use --verify full or none"
        ) from error


def _shrink_tower(table: dict[str, Any], layers: range, count: int) -> dict[str, Any]:
    return _shrink_table(table, layers, count, 1)


def _shrink_table(
    data: dict[str, Any], layers: Sequence[int], count: int, ranks: int, exchanged: int = 1
) -> dict[str, Any]:
    new = {**data, **shrunken_sizes(data, ranks, exchanged)}
    if isinstance(data.get("qk_rope_head_dim"), int):
        new.pop("qk_head_dim", None)  # the config derives it from the small sizes
    for name in LAYERS:
        if isinstance(data.get(name), int):
            new[name] = len(layers)
    for name, value in data.items():
        if name in _LISTS_OF_LAYERS and isinstance(value, list):
            new[name] = [place for place, layer in enumerate(layers) if layer in value]
        elif name in _SOURCES and isinstance(value, list):
            new[name] = [layers.index(_source(value[layer], layer, layers)) for layer in layers]
        elif name in _KEYED_BY_LAYER and isinstance(value, dict):
            by_layer = {int(layer): _in_proportion(settings, data, new) for layer, settings in value.items()}
            new[name] = {place: by_layer[layer] for place, layer in enumerate(layers) if layer in by_layer}
        elif isinstance(value, (list, tuple)) and len(value) == count and count > len(layers):
            new[name] = [new[name][layer] for layer in layers]
        elif name in _FIRST_LAYERS and isinstance(value, int):
            new[name] = sum(layer < value for layer in layers)
        elif name in _LAST_LAYERS and isinstance(value, int):
            new[name] = sum(layer >= count - value for layer in layers)
    if (head_size := _of_two_parts(data, new)) is not None:
        new["head_dim"] = head_size
    return new


def _source(source: int, layer: int, layers: Sequence[int]) -> int:
    """The layer whose keys and values `layer` reads where only `layers` are kept: itself, if its source is not."""
    return source if source in layers else layer


def _of_two_parts(data: Mapping[str, Any], new: Mapping[str, Any]) -> int | None:
    """The small `head_dim` where the real one is the sum of a head's parts without and with rotation, in any layer."""

    def parts(table: Mapping[str, Any], own: Mapping[str, Any]) -> int | None:
        sizes = [own.get(name, table.get(name)) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
        return sum(sizes) if all(isinstance(size, int) for size in sizes) else None

    def settings(table: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        keyed = [table[name] for name in _KEYED_BY_LAYER if isinstance(table.get(name), dict)]
        return [{}, *(own for by_layer in keyed for own in by_layer.values() if isinstance(own, dict))]

    if not any(parts(data, own) == data.get("head_dim") is not None for own in settings(data)):
        return None
    return max(size for own in settings(new) if (size := parts(new, own)) is not None)


def _in_proportion(settings: Mapping[str, Any], real: Mapping[str, Any], small: Mapping[str, Any]) -> dict[str, Any]:
    """A layer's own sizes, as much larger or smaller than the model's as they really are."""

    def scaled(name: str, size: Any) -> Any:
        if name in real and isinstance(size, int) and isinstance(real[name], int) and real[name]:
            return max(size * small[name] // real[name], 1)
        return size

    return {name: scaled(name, size) for name, size in settings.items()}

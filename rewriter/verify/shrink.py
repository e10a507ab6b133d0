"""A real model's config, shrunken: few layers and small sizes, but the same kinds of layers, heads and transitions.

What decides how a model is traced, split and rewired is kept: whether sizes divide by the number of ranks, whether
query heads share key/value heads, whether ranks share them, partial rotary, latent attention, experts, every layer
type, ties, biases, norms, soft-caps. What only makes it big is not: widths, vocabulary, depth, window lengths.

Layer selections name layers of the real model, so layers are not renumbered by a rule of three. `representatives`
picks real layers: the first two and the last two, every kind of layer (its type in the config, and which passes select
it), and around each kind of border between unlike neighbours the two layers on either side. Layer j of the rehearsal
stands for the j-th of them, and a pass that selects layers selects their places. A pick of `upper-half` of 80 layers is
[0, 1, 38, 39, 40, 41, 78, 79], selected [4, 5, 6, 7]: the same standard → ladder transition, the same end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig

from rewriter.errors import RewriterError

WINDOW = 9  # shorter than the test lengths 21 and 100, so that tokens leave it
MAX_POSITIONS = 192
# Sizes that the tracer uses for batch and length in its examples are no sizes of a model: 3, 37 and 111.
_TAKEN = (3, 37, 111)

_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "embedding_size")
_INNER = (
    "intermediate_size", "intermediate_size_mlp", "moe_intermediate_size", "shared_expert_intermediate_size",
    "shared_intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "d_inner",
)  # fmt: skip
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_VOCABULARY = ("vocab_size", "vocab_size_per_layer_input")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "attention_window")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PICKED_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_top_k")
_LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
_LISTS_OF_LAYERS = ("mlp_only_layers", "moe_layers", "dense_layers", "full_attn_idxs", "cross_attention_layers")
_FIRST_LAYERS = ("first_k_dense_replace", "num_dense_layers", "max_window_layers")
_LAST_LAYERS = ("num_kv_shared_layers",)
_STEPS = (
    "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq", "no_rope_layer_interval",
    "full_attention_interval", "sliding_window_pattern", "global_attn_every_n_layers", "expert_layer_period",
    "attn_layer_period", "moe_every_n_layers",
)  # fmt: skip


def text_table(config: PreTrainedConfig) -> Mapping[str, Any]:
    """The settings of the text model inside a config."""
    table: Mapping[str, Any] = config.get_text_config().to_dict()
    return table


def depth(config: PreTrainedConfig) -> int:
    """Number of decoder layers. Raises RewriterError when the config does not say."""
    table = text_table(config)
    found = next((table[name] for name in _LAYERS if isinstance(table.get(name), int)), None)
    if found is None:
        raise RewriterError(
            f"model type {config.model_type!r}: its config names no number of layers, so it cannot be shrunken"
        )
    return int(found)


def representatives(config: PreTrainedConfig, selections: Sequence[Collection[int]]) -> list[int]:
    """The layers of the real model that the rehearsal keeps, ascending: see this module's docstring."""
    table, count = text_table(config), depth(config)
    per_layer = [
        value
        for name, value in table.items()
        if isinstance(value, (list, tuple)) and len(value) == count > 4 and name not in _LISTS_OF_LAYERS
    ]
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
    return sorted(i for i in kept if 0 <= i < count)


def _listed(table: Mapping[str, Any], layer: int) -> tuple[bool, ...]:
    named = tuple(layer in table[n] for n in _LISTS_OF_LAYERS if isinstance(table.get(n), list))
    return named + tuple(layer < table[n] for n in _FIRST_LAYERS if isinstance(table.get(n), int))


def shrink(config: PreTrainedConfig, layers: Sequence[int], ranks: int = 1) -> PreTrainedConfig:
    """A small config of the same kind, with one layer for each of `layers` of the real one, for `ranks` ranks.

    Raises RewriterError when the result is no valid config of its type.
    """
    table = config.to_dict()
    text = config.get_text_config()
    inner = next((k for k, v in config.__dict__.items() if v is text), None) if text is not config else None
    small = _shrink_table(dict(table if inner is None else table[inner]), layers, depth(config), ranks)
    data = small if inner is None else {**table, inner: small}
    data.pop("quantization_config", None)
    if "auto_map" not in data:
        data["_name_or_path"] = ""
    data |= {"dtype": "float32"}
    try:
        return type(config).from_dict(data)
    except Exception as error:  # validation differs by type, and raises whatever it likes
        text_ = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RewriterError(
            f"model type {config.model_type!r} cannot be shrunken for a rehearsal: {text_}. Use --verify full or none"
        ) from error


def _shrink_table(data: dict[str, Any], layers: Sequence[int], count: int, ranks: int) -> dict[str, Any]:
    heads_name = next((n for n in _HEADS if isinstance(data.get(n), int)), None)
    heads = data[heads_name] if heads_name else 1
    kv_name = next((n for n in _KV_HEADS if isinstance(data.get(n), int)), None)
    kv_heads = data[kv_name] if kv_name else heads
    new_heads, new_kv = _heads(heads, kv_heads, ranks)
    head_size = 16 if new_heads <= 8 else 8
    hidden = next((data[n] for n in _HIDDEN if isinstance(data.get(n), int)), heads * head_size)
    old_head_size = data["head_dim"] if isinstance(data.get("head_dim"), int) else hidden // heads
    width = new_heads * head_size
    if old_head_size * heads != hidden:
        width = 64 if width != 64 else 80
    new = dict(data)
    new |= dict.fromkeys([n for n in _HEADS if isinstance(data.get(n), int)], new_heads)
    new |= dict.fromkeys([n for n in _KV_HEADS if isinstance(data.get(n), int)], new_kv)
    new |= dict.fromkeys([n for n in _HIDDEN if data.get(n) == hidden], width)
    new |= {n: _divisible_alike(data[n], 96, ranks) for n in _INNER if isinstance(data.get(n), int)}
    new |= {n: _divisible_alike(data[n], 256, ranks) for n in _VOCABULARY if isinstance(data.get(n), int)}
    new |= {n: min(data[n], WINDOW) for n in _WINDOWS if isinstance(data.get(n), int)}
    new |= {n: min(data[n], 4) for n in _EXPERTS if isinstance(data.get(n), int)}
    new |= {n: min(data[n], 2) for n in _PICKED_EXPERTS if isinstance(data.get(n), int)}
    new |= {n: min(data[n], 2) for n in ("n_group",) if isinstance(data.get(n), int)}
    new |= {n: 1 for n in ("topk_group",) if isinstance(data.get(n), int)}
    if isinstance(data.get("head_dim"), int):
        new["head_dim"] = head_size
    if isinstance(data.get("qk_rope_head_dim"), int):
        new |= {n: min(data[n], size) for n, size in _LATENT.items() if isinstance(data.get(n), int)}
        new |= {"head_dim": new["qk_rope_head_dim"]} if "head_dim" in data else {}
        new.pop("qk_head_dim", None)
    if isinstance(data.get("query_pre_attn_scalar"), int):
        # Not the head size, unless it is that in the real model.
        new["query_pre_attn_scalar"] = head_size + (0 if data["query_pre_attn_scalar"] == old_head_size else 4)
    if isinstance(data.get("rotary_dim"), int):
        new["rotary_dim"] = head_size if data["rotary_dim"] == old_head_size else head_size // 2
    rope = data.get("rope_parameters") or data.get("rope_scaling")
    if isinstance(rope, dict):
        new["rope_parameters"] = _rope(rope, head_size, data.get("partial_rotary_factor"))
    else:  # learned or no positions; rotary ones cost nothing, and some of their variants depend on the length
        new |= {n: min(data[n], MAX_POSITIONS) for n in _POSITIONS if isinstance(data.get(n), int)}
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(data.get(name), list) or (data.get(name) or 0) >= new.get("vocab_size", 256):
            new[name] = None if name != "pad_token_id" else 0
    return _shrink_depth(new, data, layers, count)


def _shrink_depth(new: dict[str, Any], data: Mapping[str, Any], layers: Sequence[int], count: int) -> dict[str, Any]:
    for name in _LAYERS:
        if isinstance(data.get(name), int):
            new[name] = len(layers)
    for name, value in data.items():
        if name in _LISTS_OF_LAYERS and isinstance(value, list):
            new[name] = [place for place, layer in enumerate(layers) if layer in value]
        elif isinstance(value, (list, tuple)) and len(value) == count and count > len(layers):
            new[name] = [value[layer] for layer in layers]
        elif name in _FIRST_LAYERS and isinstance(value, int):
            new[name] = sum(layer < value for layer in layers)
        elif name in _LAST_LAYERS and isinstance(value, int):
            new[name] = sum(layer >= count - value for layer in layers)
    return new


def _heads(heads: int, kv_heads: int, ranks: int) -> tuple[int, int]:
    """(query heads, key/value heads): fewest that share and divide as the real ones do."""
    unit = max(ranks, 2)
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        return heads, kv_heads  # cannot be split: kept, so that the rehearsal cannot be split either
    if kv_heads == heads:
        new = unit
        return (new + unit, new + unit) if new in _TAKEN else (new, new)
    if kv_heads % ranks == 0 and kv_heads > 1:
        return 2 * unit, unit
    return 2 * unit, kv_heads


def _divisible_alike(real: int, about: int, ranks: int) -> int:
    """A size near `about` that divides by `ranks` exactly if `real` does."""
    size = -(-about // ranks) * ranks
    if real % ranks:
        size += 1
    while size in _TAKEN or (size % ranks == 0) != (real % ranks == 0):
        size += ranks if size % ranks == 0 else 1
    return min(size, real)


def _rope(rope: Mapping[str, Any], head_size: int, partial: float | None) -> dict[str, Any]:
    """Rotary settings, also nested by layer type, with per-frequency lists as long as the small head needs."""
    fraction = rope.get("partial_rotary_factor", partial)  # may be None in either place
    frequencies = int(head_size * (fraction if isinstance(fraction, (int, float)) else 1.0)) // 2
    new: dict[str, Any] = {}
    for name, value in rope.items():
        if isinstance(value, dict):
            new[name] = _rope(value, head_size, partial)
        elif name in ("short_factor", "long_factor") and isinstance(value, list):
            new[name] = value[:frequencies]
        elif name == "mrope_section" and isinstance(value, list):
            others = [frequencies // len(value)] * (len(value) - 1)
            new[name] = [frequencies - sum(others), *others]
        else:
            new[name] = value
    return new

"""The settings that make a model big, by name, and small values for them that fit together.

Which settings a config has differs by type, what a name means hardly does; so this is a table of names. Sizes that
have to agree with each other (width = heads x head size, a state-space model's heads with its width) are computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

WINDOW = 9  # shorter than the test lengths 21 and 100, so that tokens leave it
MAX_POSITIONS = 192
PRETRAINED = 32  # tokens beyond which rotary frequencies change: between the test lengths 21 and 100
ALIGNED = 16  # channels that some kernels want a multiple of (16 bytes of any dtype)
# Sizes that the tracer uses for batch and length in its examples are no sizes of a model: 3, 37 and 111.
TAKEN = (3, 37, 111)

HIDDEN = (
    "hidden_size", "n_embd", "d_model", "dim", "emb_dim", "word_embed_proj_dim", "embedding_size", "lru_width",
    "embedding_dim",
)  # fmt: skip
INNER = (
    "intermediate_size", "intermediate_size_mlp", "moe_intermediate_size", "shared_expert_intermediate_size",
    "shared_intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "d_inner", "dim_ff", "dff",
    "feed_forward_size", "decoder_ffn_dim", "encoder_ffn_dim", "dense_intermediate_size", "expert_ffn_hidden_size",
    "moe_shared_expert_intermediate_size", "shared_experts_intermediate_size", "mlp_dim",
)  # fmt: skip
HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads",
    "encoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads", "swa_num_attention_heads",
)  # fmt: skip
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "swa_num_key_value_heads")
HEAD_SIZES = ("head_dim", "d_head", "dim_head", "attention_head_size", "swa_head_dim", "kv_channels", "d_kv")
VOCABULARY = ("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size", "unpadded_vocab_size")
POSITIONS = (
    "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions", "max_source_positions",
)  # fmt: skip
WINDOWS = (
    "sliding_window", "attention_chunk_size", "window_size", "attention_window", "sliding_window_size",
    "keep_window_size", "attention_window_size", "index_topk",
)  # fmt: skip
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
PICKED_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_top_k", "moe_topk", "top_k_experts")
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
# Sizes that have to agree with no other one.
# Of few heads of an indexer all are 0 for many keys, and which of equal keys it chooses is rounding.
SMALL = {
    "n_group": 2, "topk_group": 1, "num_expert_group": 2, "zero_expert_num": 2, "o_lora_rank": 16, "o_groups": 4,
    "index_head_dim": 16, "index_n_heads": 16, "indexer_head_dim": 16, "indexer_n_heads": 16,
    "index_block_size": 8, "index_topk_blocks": 2, "index_kpool": 3,
    "laurel_rank": 8, "gated_norm_rank": 8, "hidden_size_per_layer_input": 16, "d_rel": 8, "rel_extent": 16,
    "router_hidden_size": 16, "adapter_rank": 8, "hc_lowrank": 16, "ple_embed_dim": 64,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_head_dim": 16,
    "mamba_d_state": 16, "state_size": 16, "ssm_state_size": 16, "mamba_dt_rank": 8, "time_step_rank": 8,
    "mamba_chunk_size": 8, "chunk_size": 8,
    "encoder_layers": 2, "num_encoder_layers": 2,
    "shape_vocab_size": 256, "shape_embed_dim": 32, "pronunciation_vocab_size": 256, "pronunciation_embed_dim": 32,
    "image_size": 64, "crop_size": 64, "num_position_embeddings": 64, "mm_tokens_per_image": 4,
}  # fmt: skip
# Heads of a state-space mixer and their size: together as wide as `expand` times the model, or as the last one says.
MIXERS = (
    ("mamba_n_heads", "mamba_d_head", "mamba_expand", "mamba_d_ssm"),
    ("mamba_num_heads", "mamba_head_dim", "expand", "mamba_d_ssm"),
    ("n_mamba_heads", "mamba_headdim", "mamba_expand", "mamba_d_ssm"),
    ("num_heads", "head_dim", "expand", "mamba_d_ssm"),
)
# Groups of heads that share what they read (B and C of a state space).
GROUPS = ("mamba_n_groups", "n_groups")

LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "num_decoder_layers",
    "num_blocks",
)


def shrunken_sizes(data: Mapping[str, Any], ranks: int, exchanged: int = 1) -> dict[str, Any]:
    """Small values for the sizes in `data`, one table of settings, that divide by `ranks` where the real ones do.

    The numbers of heads do so by `ranks` · `exchanged`.
    """
    heads = next((data[n] for n in HEADS if isinstance(data.get(n), int)), 1)
    kv_heads = next((data[n] for n in KV_HEADS if isinstance(data.get(n), int)), heads)
    new_heads, new_kv = _heads(heads, kv_heads, ranks * exchanged)
    head_size = 16 if new_heads <= 8 else 8
    hidden = next((data[n] for n in HIDDEN if isinstance(data.get(n), int)), heads * head_size)
    old_head_size = data["head_dim"] if isinstance(data.get("head_dim"), int) else hidden // heads
    width = new_heads * head_size if heads > 1 else 64  # some types have no heads
    if old_head_size * heads != hidden:
        width = 64 if width != 64 else 80
    new: dict[str, Any] = dict.fromkeys(_integers(data, HEADS), new_heads)
    new |= dict.fromkeys(_integers(data, KV_HEADS), new_kv)
    new |= dict.fromkeys([n for n in HIDDEN if data.get(n) == hidden], width)
    new |= {n: _divisible_alike(data[n], 96, ranks) for n in _integers(data, INNER)}
    new |= {
        n: [_divisible_alike(size, 96, ranks) for size in data[n]]
        for n in INNER
        if isinstance(data.get(n), (list, tuple)) and all(isinstance(size, int) for size in data[n])
    }
    new |= {n: _divisible_alike(data[n], 256, ranks) for n in _integers(data, VOCABULARY)}
    if len(_integers(data, ("vocab_size", "unpadded_vocab_size"))) == 2:  # the padding stays, or there is none
        padding = ranks if data["unpadded_vocab_size"] < data["vocab_size"] else 0
        new["unpadded_vocab_size"] = _divisible_alike(data["unpadded_vocab_size"], new["vocab_size"] - padding, ranks)
    new |= {n: min(data[n], WINDOW) for n in _integers(data, WINDOWS)}
    new |= {n: min(data[n], 4) for n in _integers(data, EXPERTS)}
    new |= {n: min(data[n], 2) for n in _integers(data, PICKED_EXPERTS)}
    new |= {n: min(data[n], size) for n, size in SMALL.items() if n in _integers(data, SMALL)}
    new |= {
        n: [min(size, SMALL[n]) for size in data[n]] for n in ("image_size",) if isinstance(data.get(n), (list, tuple))
    }
    new |= dict.fromkeys(_integers(data, HEAD_SIZES), head_size)
    if isinstance(data.get("qk_rope_head_dim"), int):
        new |= {n: min(data[n], size) for n, size in LATENT.items() if isinstance(data.get(n), int)}
        fraction = data.get("partial_rotary_factor")
        if isinstance(fraction, float) and fraction * (data.get("head_dim") or 0) == data["qk_rope_head_dim"]:
            new["head_dim"] = int(new["qk_rope_head_dim"] / fraction)
        elif "head_dim" in data:
            new["head_dim"] = new["qk_rope_head_dim"]
    inner, size = data.get("attention_hidden_size"), data.get("attention_head_dim")
    if isinstance(inner, int) and inner % hidden == 0:  # attention reads something beside the stream
        new["attention_hidden_size"] = inner // hidden * width
        if isinstance(size, int) and size * heads == inner:
            new["attention_head_dim"] = new["attention_hidden_size"] // new_heads
    if isinstance(data.get("query_pre_attn_scalar"), int):
        # Not the head size, unless it is that in the real model.
        new["query_pre_attn_scalar"] = head_size + (0 if data["query_pre_attn_scalar"] == old_head_size else 4)
    if isinstance(data.get("rotary_dim"), int):
        new["rotary_dim"] = head_size if data["rotary_dim"] == old_head_size else head_size // 2
    if isinstance(data.get("linear_num_key_heads"), int) and isinstance(data.get("linear_num_value_heads"), int):
        shared, keys = data["linear_num_value_heads"] // data["linear_num_key_heads"], data["linear_num_key_heads"]
        keys = _few(keys, ranks) if keys % ranks == 0 else new_kv
        new |= {"linear_num_key_heads": keys, "linear_num_value_heads": keys * max(shared, 1)}
    new |= {n: 2 * _few(data[n], ranks) for n in _integers(data, ("linear_num_heads",))}
    new |= {n: min(data[n], _few(data[n], ranks)) for n in _integers(data, GROUPS)}
    for count, size, expand, inner in MIXERS:
        if len(_integers(data, (count, size))) == 2 and (count != "num_heads" or isinstance(data.get(expand), int)):
            new[count] = 2 * _few(data[count], ranks)
            new[size] = max(int(data.get(expand) or 1) * width // new[count], 4)
            if isinstance(data.get(inner), int):
                new[inner] = new[count] * new[size]
    rope = data.get("rope_parameters") or data.get("rope_scaling")
    if isinstance(rope, dict):
        new["rope_parameters"] = _rope(rope, new.get("head_dim", head_size), data.get("partial_rotary_factor"))
        scaled = {"longrope": ["original_max_position_embeddings"], "dynamic": ["max_position_embeddings"]}
        names = [name for kind in rope_types(rope) for name in scaled.get(kind, ())]
        new |= {name: min(data[name], PRETRAINED) for name in _integers(data, names)}
    else:  # learned or no positions; rotary ones cost nothing, and some of their variants depend on the length
        new |= {n: min(data[n], MAX_POSITIONS) for n in _integers(data, POSITIONS)}
    return new | _token_ids(data, new.get("vocab_size", 256))


def _integers(data: Mapping[str, Any], names: Mapping[str, Any] | Sequence[str]) -> list[str]:
    return [n for n in names if isinstance(data.get(n), int) and not isinstance(data[n], bool)]


def _token_ids(data: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    """Special tokens inside the vocabulary. A list of end tokens becomes its first."""
    small = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    small |= dict.fromkeys(("sep_token_id", "cls_token_id", "forced_eos_token_id", "eod_token_id"), 2)
    return {
        name: token
        for name, token in small.items()
        if isinstance(data.get(name), list) or (isinstance(data.get(name), int) and data[name] >= vocabulary)
    }


def _heads(heads: int, kv_heads: int, ranks: int) -> tuple[int, int]:
    """(query heads, key/value heads): fewest that share and divide as the real ones do."""
    unit = max(ranks, 2)
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        return heads, kv_heads  # cannot be split: kept, so that the copy cannot be split either
    if kv_heads == heads:
        new = unit
        return (new + unit, new + unit) if new in TAKEN else (new, new)
    if kv_heads % ranks == 0 and kv_heads > 1:
        return 2 * unit, unit
    return 2 * unit, kv_heads


def _few(real: int, ranks: int) -> int:
    """A small number of heads or groups, at least two, that divides by `ranks` if `real` does."""
    unit = max(ranks, 2) if real % ranks == 0 else 2
    return 2 * unit if unit in TAKEN else unit


def _divisible_alike(real: int, about: int, ranks: int) -> int:
    """A size near `about` that divides by `ranks` exactly if `real` does, and is as well aligned for kernels if not."""
    if real % ranks and real % ALIGNED == 0:
        sizes = range(-(-about // ALIGNED) * ALIGNED, about * ranks * ALIGNED, ALIGNED)
        return min(next(size for size in sizes if size % ranks), real)
    size = -(-about // ranks) * ranks
    if real % ranks:
        size += 1
    while size in TAKEN or (size % ranks == 0) != (real % ranks == 0):
        size += ranks if size % ranks == 0 else 1
    return min(size, real)


def _in_proportion(parts: Sequence[int], total: int) -> list[int]:
    """`total` in proportion to `parts`; what rounding down leaves over goes to those with the largest remainders."""
    exact = [part * total / sum(parts) for part in parts]
    largest = sorted(range(len(parts)), key=lambda i: int(exact[i]) - exact[i])
    more = largest[: total - sum(map(int, exact))]
    return [int(size) + (i in more) for i, size in enumerate(exact)]


def rope_types(rope: Any) -> set[str]:
    """The kinds of rotary scaling that a config's settings name, also nested by layer type."""
    if not isinstance(rope, Mapping):
        return set()
    kind = rope.get("rope_type") or rope.get("type")
    return {str(kind)} if kind else {kind for inner in rope.values() for kind in rope_types(inner)}


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
        elif name == "original_max_position_embeddings" and "longrope" in rope_types(rope):
            new[name] = min(value, PRETRAINED)
        elif name == "mrope_section" and isinstance(value, list):
            new[name] = _in_proportion(value, frequencies)
        else:
            new[name] = value
    return new

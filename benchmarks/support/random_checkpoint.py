"""Llama checkpoints of random bf16 weights, or of none: files of holes, which take no room on a disk."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from rewriter.weights.header import encode_header


@dataclass(frozen=True)
class Sizes:
    """Of a Llama; `file_bytes` is about that of one safetensors file."""

    hidden: int = 4096
    feed_forward: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head: int = 128
    vocabulary: int = 32000
    file_bytes: float = 1e9


def layer_shapes(sizes: Sizes, index: int) -> dict[str, tuple[int, ...]]:
    """One decoder layer's tensors."""
    prefix, hidden, kv = f"model.layers.{index}.", sizes.hidden, sizes.kv_heads * sizes.head
    return {
        f"{prefix}input_layernorm.weight": (hidden,),
        f"{prefix}mlp.down_proj.weight": (hidden, sizes.feed_forward),
        f"{prefix}mlp.gate_proj.weight": (sizes.feed_forward, hidden),
        f"{prefix}mlp.up_proj.weight": (sizes.feed_forward, hidden),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
        f"{prefix}self_attn.k_proj.weight": (kv, hidden),
        f"{prefix}self_attn.o_proj.weight": (hidden, sizes.heads * sizes.head),
        f"{prefix}self_attn.q_proj.weight": (sizes.heads * sizes.head, hidden),
        f"{prefix}self_attn.v_proj.weight": (kv, hidden),
    }


def make(
    directory: Path, gigabytes: float, sizes: Sizes = Sizes(), *, holes: bool = False, shuffle: int | None = None
) -> int:
    """Write config.json, weights and index of a Llama of about this size; returns its number of layers.

    With `holes` files have headers and sizes, but no blocks: all weights are read as zeros. `shuffle` is the seed of a
    random order of tensors over files.
    """
    outside = (sizes.vocabulary, sizes.hidden)
    shapes: dict[str, tuple[int, ...]] = {"lm_head.weight": outside, "model.embed_tokens.weight": outside}
    shapes["model.norm.weight"] = (sizes.hidden,)
    layers = 0
    while layers < 2 or sum(map(nbytes, shapes.values())) < gigabytes * 1e9:
        shapes |= layer_shapes(sizes, layers)
        layers += 1
    if shuffle is not None:
        shapes = dict(random.Random(shuffle).sample(list(shapes.items()), len(shapes)))
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in shapes.items():
        if sum(map(nbytes, groups[-1].values())) + nbytes(shape) > sizes.file_bytes:
            groups.append({})
        groups[-1][name] = shape
    index = {}
    for number, group in enumerate(groups, start=1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors"
        index |= dict.fromkeys(group, file)
        _write(directory / file, group, holes)
    total = sum(map(nbytes, shapes.values()))
    table = {"metadata": {"total_size": total}, "weight_map": index}
    (directory / "model.safetensors.index.json").write_text(json.dumps(table))
    (directory / "config.json").write_text(json.dumps(config(sizes, layers)))
    os.sync()
    return layers


def config(sizes: Sizes, layers: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.feed_forward,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head,
        "num_hidden_layers": layers,
        "vocab_size": sizes.vocabulary,
        "tie_word_embeddings": False,
    }


def nbytes(shape: tuple[int, ...]) -> int:
    return 2 * prod(shape)


def _write(path: Path, tensors: Mapping[str, tuple[int, ...]], holes: bool) -> None:
    """A safetensors file of random bf16 bit patterns without infinities and NaNs, no two pieces of it alike."""
    with path.open("wb") as file:
        file.write(encode_header({n: ("BF16", s, nbytes(s)) for n, s in tensors.items()}, {"format": "pt"}))
        left = sum(map(nbytes, tensors.values()))
        if holes:
            file.truncate(file.tell() + left)
            return
        while left:
            # The exponent's highest bit cleared: every value is finite.
            noise = bytearray(os.urandom(min(left, 64 << 20)))
            noise[1::2] = noise[1::2].translate(bytes(b & 0xBF for b in range(256)))
            left -= file.write(noise)

"""Random architectures and random mixes of layers, drawn from a seed: the same on every machine."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import zoo
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from rewriter.check.per_rank_reference import LayerMode
from rewriter.ir import Program
from rewriter.passes import available

# Norms over all heads reduce inside of attention, which therefore cannot read a rank's own residual.
SUMS_INSIDE = {"olmo2"}
EXPERTS = {"mixtral", "qwen3_moe"}
FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "granite", "starcoder2", "gemma2"),
    *("mixtral", "qwen3_moe", "gpt_neox", "gpt2"),
)
ALL_FAMILIES = (*FAMILIES, *sorted(SUMS_INSIDE))


class Architecture(NamedTuple):
    """A config with what a test has to know of it: blocks per layer, and whether MLPs divide by the ranks."""

    config: PretrainedConfig
    blocks: int
    divides: bool

    def name(self) -> str:
        return str(self.config.model_type)

    def whole(self, ranks: int) -> list[str]:
        """The modules that every one of `ranks` ranks computes in full, by their names in the model."""
        if self.divides or ranks == 1:
            return []
        layers = "transformer.h" if self.name() == "gpt2" else "model.layers"
        return [f"{layers}.{layer}.mlp" for layer in range(self.config.num_hidden_layers)]

    def equal_runs(self, ranks: int) -> bool:
        """Whether every rank holds as many key/value heads, next to each other, and none of them in part."""
        kv_heads = getattr(self.config, "num_key_value_heads", ranks)
        return kv_heads % ranks == 0 or ranks % kv_heads == 0


def architecture(rng: random.Random, family: str, ranks: int = 4) -> Architecture:
    """A random config of `family`: heads, key/value heads, sizes, biases, norms, tied or not, experts, depth 2 to 7.

    Heads divide by `ranks`, and MLPs, where they do, by it and by two and four."""
    unit = math.lcm(4, ranks)
    heads = rng.choice([4, 8, 12] if unit == 4 else [ranks, 2 * ranks])
    kv_heads = rng.choice([k for k in range(1, heads + 1) if heads % k == 0])
    size, tied = rng.choice([8, 16]), rng.random() < 0.5
    divides = rng.random() < 0.75 or family in EXPERTS | {"gpt_neox"}
    inner = unit * rng.randint(40 // unit, 160 // unit) + (0 if divides else 1)
    common: dict[str, Any] = {"vocab_size": rng.choice([256, 259]), "pad_token_id": 0, "bos_token_id": 1}
    common |= {"eos_token_id": None, "tie_word_embeddings": tied}
    depth = rng.randint(2, 7)
    if family == "gpt2":
        names = {"n_embd": heads * size, "n_layer": depth, "n_head": heads, "n_inner": inner, "n_positions": 192}
        return Architecture(AutoConfig.for_model(family, **common, **names), 2, divides)
    common |= {"hidden_size": heads * size, "num_hidden_layers": depth, "num_attention_heads": heads}
    common |= {"intermediate_size": inner, "max_position_embeddings": 192, "num_key_value_heads": kv_heads}
    wide = rng.choice([size, 2 * size])  # heads need not make up the hidden size
    blocks = 2
    if family == "llama":
        common |= {"attention_bias": rng.random() < 0.5, "mlp_bias": rng.random() < 0.5, "head_dim": wide}
    elif family == "granite":
        common |= {"residual_multiplier": 0.7, "attention_bias": rng.random() < 0.5}
    elif family == "qwen3":
        common |= {"head_dim": wide, "attention_bias": rng.random() < 0.5}
    elif family == "starcoder2":
        common |= {"use_bias": rng.random() < 0.5}
    elif family == "mixtral":
        common |= {"num_local_experts": rng.choice([4, 6]), "num_experts_per_tok": 2}
    elif family == "qwen3_moe":
        common |= {"num_experts": rng.choice([4, 6, 8]), "num_experts_per_tok": rng.randint(1, 3), "head_dim": wide}
        wide = unit * rng.randint(max(1, 20 // unit), 48 // unit)
        common |= {"moe_intermediate_size": wide, "norm_topk_prob": rng.random() < 0.5}
        common |= {"decoder_sparse_step": rng.randint(1, 2)}
    elif family == "gemma2":
        common |= {"head_dim": wide, "query_pre_attn_scalar": 20, "sliding_window": 9}
    elif family == "gpt_neox":
        blocks = rng.choice([1, 2])
        common |= {"use_parallel_residual": blocks == 1, "attention_bias": rng.random() < 0.5}
    return Architecture(AutoConfig.for_model(family, **common), blocks, divides)


def build(drawn: Architecture, seed: int) -> PreTrainedModel:
    """A model of a drawn architecture: eager, eval mode, large random weights."""
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(
            drawn.config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
        )
    zoo.randomize(model, seed)
    return model.eval()


class Mix(NamedTuple):
    """What each layer is, over `ranks` ranks, as runs of layers of one mode."""

    ranks: int
    runs: tuple[tuple[tuple[int, ...], LayerMode], ...]
    keep: dict[int, tuple[bool, ...]]

    def modes(self) -> dict[int, LayerMode]:
        return {
            layer: LayerMode(mode.mode, self.keep.get(layer, ()), mode.resync, mode.norm)
            for layers, mode in self.runs
            for layer in layers
        }

    def __str__(self) -> str:
        runs = (f"{layers[0]}-{layers[-1]} {_described(mode)}" for layers, mode in self.runs)
        return f"{', '.join(runs)}; keep {self.keep} on {self.ranks} ranks"


def _described(mode: LayerMode) -> str:
    option = {"desync": mode.resync, "parallel": mode.norm}.get(mode.mode)
    return f"{mode.mode} ({option})" if option else mode.mode


# What drop_sync makes of a layer, where ranks come together by sum.
DROP_SYNC = (False, True)


def mix(rng: random.Random, drawn: Architecture, ranks: int) -> Mix:
    """A random mix for a drawn architecture. A run of desynced layers drops at least one reduction."""
    modes = ["standard", "ladder"]
    if drawn.blocks == 2:
        modes += ["parallel"]
    if ranks > 1 and drawn.name() not in SUMS_INSIDE:
        modes += ["desync", "desync"] + (["own_partial"] if drawn.divides else [])
    depth, layer, before = drawn.config.num_hidden_layers, 0, ""
    runs: list[tuple[tuple[int, ...], LayerMode]] = []
    keep: dict[int, tuple[bool, ...]] = {}
    while layer < depth:
        layers = tuple(range(layer, min(depth, layer + rng.randint(1, 3))))
        reducing = drawn.blocks if drawn.divides else 1  # per layer
        fitting = [m for m in modes if m != before and not (m == "desync" and len(layers) * reducing < 2)]
        if drawn.blocks * (layers[-1] + 1) == 1:
            fitting = ["standard"]  # the first block of a model has nothing to skip
        mode = rng.choice(fitting)
        norm = "own" if drawn.name() == "olmo2" else rng.choice(["own", "attention", "mlp"])
        runs.append((layers, LayerMode(mode, (), rng.choice(["mean", "sum"]), norm)))  # type: ignore[arg-type]
        if mode == "desync":
            keep |= {n: tuple(rng.random() < 0.4 for _ in range(drawn.blocks)) for n in layers}
            keep[layers[0]] = (False,) * drawn.blocks
            if drawn.blocks == 2 and drawn.divides and rng.random() < 0.4:
                keep |= dict.fromkeys(layers, DROP_SYNC)
        layer, before = layers[-1] + 1, mode
    return Mix(ranks, tuple(runs), keep)


def rewrite(rng: random.Random, program: Program, drawn: Architecture, chosen: Mix) -> Program:
    """`program` rewritten to a mix by the passes, in random order, with reductions merged before or after."""
    passes = available()
    rewrites = [passes["tensor_parallel"]()] if chosen.ranks > 1 else []
    program = program.with_(mesh={"tp": chosen.ranks} if chosen.ranks > 1 else {})
    for layers, mode in rng.sample(chosen.runs, len(chosen.runs)):
        selection: Sequence[int] = list(layers)
        if mode.mode == "ladder":
            rewrites.append(passes["ladder"](selection))
        elif mode.mode == "own_partial":
            rewrites.append(passes["ladder"](selection, variant="own_partial"))
        elif mode.mode == "parallel":
            rewrites.append(passes["parallel_block"](selection, norm=mode.norm))
        elif mode.resync == "sum" and all(chosen.keep.get(layer) == DROP_SYNC for layer in layers):
            rewrites.append(passes["drop_sync"](layers=selection))
        elif mode.mode == "desync":
            # a pattern is about the reductions of a layer: none after a block that every rank computes in full
            reducing = slice(None) if drawn.divides else slice(1)
            pattern = tuple(
                tuple("keep" if keep else "drop" for keep in chosen.keep[layer][reducing]) for layer in layers
            )
            rewrites.append(passes["desync"](selection, pattern=pattern, resync=mode.resync))
    if chosen.ranks > 1:
        rewrites.insert(rng.randint(1, len(rewrites)), passes["merge_reductions"]())
        rewrites += [passes["overlap"](branches=rng.choice((1, 2)))] * (rng.random() < 0.5)
    for step in rewrites:
        program = step.apply(program)
    return program

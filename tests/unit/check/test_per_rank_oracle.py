"""The per-rank reference against the papers, written out in plain float64 tensors: P ranks, each with its own slices.

No Hugging Face module and no hook takes part here. Every rank multiplies by its own rows and columns of the checkpoint,
and layers are what the sources say: Alg. 1 of Ladder Residual with its pending sums, the desynced residual of the
authors' training code, own-partial reads with the rank's own pending partial, PaLM's parallel block.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import zoo
from oracles import ladder_logits, relative_error
from per_rank_wiring import LADDER, OWN, PARALLEL, STANDARD, all_reduce, desync, part, rotate
from torch.nn.functional import gelu, layer_norm, linear, silu, softmax

from rewriter.check.per_rank_reference import LayerMode, PerRankReference
from rewriter.common.errors import RewriterError

CLOSE = 1e-5
DIFFERENT = 1e-2

Branch = Callable[[int, int, torch.Tensor], torch.Tensor]
"""(layer, rank, stream) → what this rank writes: entry norm, projections, the rank's part of the exit."""


class Plain(NamedTuple):
    """A model as its ranks hold it: one entry in `branches` per block of a layer."""

    embedding: torch.Tensor
    branches: Sequence[Branch]
    head: Callable[[torch.Tensor], torch.Tensor]


# --- The ranks' parts of models, from the tensors of their checkpoints ---------------------------------------------


def attend(q_BHSD: torch.Tensor, k_BHSD: torch.Tensor, v_BHSD: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(q_BHSD.shape[2])
    scores = q_BHSD @ k_BHSD.transpose(-1, -2) / q_BHSD.shape[-1] ** 0.5
    scores = scores.masked_fill(positions[None, :] > positions[:, None], float("-inf"))
    return (softmax(scores, -1) @ v_BHSD).transpose(1, 2).flatten(2)


def llama(w: Mapping[str, torch.Tensor], config: Any, ranks: int, ids: torch.Tensor) -> Plain:
    """Llama, Qwen2 and Mixtral, with or without biases."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    size, base = config.hidden_size // heads, config.rope_parameters["rope_theta"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return w[name] * x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()

    def project(x: torch.Tensor, at: str, rows: torch.Tensor) -> torch.Tensor:
        bias = w.get(f"{at}.bias")
        return linear(x, w[f"{at}.weight"][rows], None if bias is None else bias[rows])

    def leave(x: torch.Tensor, at: str, rank: int) -> torch.Tensor:
        bias = w.get(f"{at}.bias")
        return linear(x, part(w[f"{at}.weight"], 1, rank, ranks), None if bias is None else bias / ranks)

    def attention(layer: int, rank: int, stream: torch.Tensor) -> torch.Tensor:
        at = f"model.layers.{layer}."
        x = norm(stream, at + "input_layernorm.weight")
        mine = part(torch.arange(heads), 0, rank, ranks)
        serving = mine // (heads // kv_heads)  # the key/value head of each of this rank's query heads

        def split(name: str, chosen: torch.Tensor) -> torch.Tensor:
            rows = (chosen[:, None] * size + torch.arange(size)).flatten()
            return project(x, f"{at}self_attn.{name}", rows).unflatten(-1, (-1, size)).transpose(1, 2)

        q, k, v = split("q_proj", mine), split("k_proj", serving), split("v_proj", serving)
        return leave(attend(rotate(q, size, base), rotate(k, size, base), v), at + "self_attn.o_proj", rank)

    def mlp(layer: int, rank: int, stream: torch.Tensor) -> torch.Tensor:
        at = f"model.layers.{layer}."
        x = norm(stream, at + "post_attention_layernorm.weight")
        if at + "mlp.gate.weight" in w:
            return experts(x, at + "mlp.", rank)
        rows = part(torch.arange(config.intermediate_size), 0, rank, ranks)
        hidden = silu(project(x, at + "mlp.gate_proj", rows)) * project(x, at + "mlp.up_proj", rows)
        return leave(hidden, at + "mlp.down_proj", rank)

    def experts(x: torch.Tensor, at: str, rank: int) -> torch.Tensor:
        """Every rank routes what it itself reads, and holds its channels of every expert."""
        top, chosen = softmax(linear(x, w[at + "gate.weight"]), -1).topk(config.num_experts_per_tok, -1)
        top = top / top.sum(-1, keepdim=True)
        written = torch.zeros_like(x)
        for expert in range(config.num_local_experts):
            gate, up = (part(m, 0, rank, ranks) for m in w[at + "experts.gate_up_proj"][expert].chunk(2, 0))
            down = part(w[at + "experts.down_proj"][expert], 1, rank, ranks)
            share = (top * (chosen == expert)).sum(-1, keepdim=True)
            written = written + share * linear(silu(linear(x, gate)) * linear(x, up), down)
        return written

    def head(x: torch.Tensor) -> torch.Tensor:
        return linear(norm(x, "model.norm.weight"), w["lm_head.weight"])

    return Plain(w["model.embed_tokens.weight"][ids], (attention, mlp), head)


def gpt_neox(w: Mapping[str, torch.Tensor], config: Any, ranks: int, ids: torch.Tensor) -> Plain:
    """GPT-NeoX with parallel attention and MLP: one block per layer, biases everywhere, a quarter of a head rotates."""
    heads, width = config.num_attention_heads, config.hidden_size
    size, base = width // heads, config.rope_parameters["rope_theta"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return layer_norm(x, (width,), w[f"{name}.weight"], w[f"{name}.bias"], config.layer_norm_eps)

    def copy_to_group(x: torch.Tensor, at: str, rank: int) -> torch.Tensor:
        return linear(x, part(w[f"{at}.weight"], 0, rank, ranks), part(w[f"{at}.bias"], 0, rank, ranks))

    def leave(x: torch.Tensor, at: str, rank: int) -> torch.Tensor:
        return linear(x, part(w[f"{at}.weight"], 1, rank, ranks), w[f"{at}.bias"] / ranks)

    def block(layer: int, rank: int, stream: torch.Tensor) -> torch.Tensor:
        at = f"gpt_neox.layers.{layer}."
        fused = copy_to_group(norm(stream, at + "input_layernorm"), at + "attention.query_key_value", rank)
        q, k, v = fused.unflatten(-1, (-1, 3 * size)).transpose(1, 2).chunk(3, -1)
        turning = size // 4
        attention = leave(attend(rotate(q, turning, base), rotate(k, turning, base), v), at + "attention.dense", rank)
        x = norm(stream, at + "post_attention_layernorm")
        return attention + leave(gelu(copy_to_group(x, at + "mlp.dense_h_to_4h", rank)), at + "mlp.dense_4h_to_h", rank)

    def head(x: torch.Tensor) -> torch.Tensor:
        return linear(norm(x, "gpt_neox.final_layer_norm"), w["lm_head.weight"])

    return Plain(w["gpt_neox.embed_in.weight"][ids], (block,), head)


# --- The layers, as their sources write them -----------------------------------------------------------------------


def run(model: Plain, modes: Sequence[LayerMode], ranks: int) -> torch.Tensor:
    """Logits. `x[r]` is rank r's residual; `flight` are partial sums under way, the older first."""
    x = [model.embedding] * ranks
    flight: list[list[torch.Tensor]] = []

    def land(count: int) -> None:
        """The first `count` of the reductions in flight arrive everywhere."""
        for _ in range(count):
            total = all_reduce(flight.pop(0))
            x[:] = [residual + total for residual in x]

    def computed(branch: Branch, layer: int, reads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [branch(layer, rank, reads[rank]) for rank in range(ranks)]

    for layer, mode in enumerate(modes):
        before = modes[layer - 1].mode if layer else "standard"
        if mode.mode in ("ladder", "own_partial"):
            if before not in ("standard", "parallel", mode.mode):
                land(len(flight))
            for branch in model.branches:
                land(len(flight) - 1)
                own = flight[0] if flight and mode.mode == "own_partial" else [torch.zeros(())] * ranks
                flight.append(computed(branch, layer, [a + b for a, b in zip(x, own, strict=True)]))
            continue
        land(len(flight))
        if mode.mode == "desync":
            if before != "desync":
                agreed, added = x[0], [torch.zeros_like(x[0])] * ranks
            follows = layer + 1 < len(modes) and modes[layer + 1].mode == "desync"
            for place, branch in enumerate(model.branches):
                partial = computed(branch, layer, x)
                added = [a + f for a, f in zip(added, partial, strict=True)]
                if not (mode.keep[place] or (not follows and place == len(model.branches) - 1)):
                    x = [a + f for a, f in zip(x, partial, strict=True)]
                    continue
                if mode.resync == "mean":
                    x = [all_reduce([f + a / ranks for f, a in zip(partial, x, strict=True)])] * ranks
                else:
                    x = [agreed + all_reduce(added)] * ranks
                agreed, added = x[0], [torch.zeros_like(x[0])] * ranks
        elif mode.mode == "parallel":
            together = [computed(branch, layer, x) for branch in model.branches]
            flight.append([all_reduce(parts) for parts in zip(*together, strict=True)])
        else:
            for branch in model.branches:
                land(len(flight))
                flight.append(computed(branch, layer, x))
    land(len(flight))
    return model.head(x[0])


# --- They agree ------------------------------------------------------------------------------------------------------


MIXES = {
    "ladder": [LADDER] * 4,
    "own-partial": [OWN] * 4,
    "desync-2x": [desync(False, True)] * 4,
    "desync-2x-sum": [desync(False, True, resync="sum")] * 4,
    "desync-4x": [desync(False, False), desync(False, True)] * 2,
    "desync-4x-sum": [desync(False, False, resync="sum"), desync(False, True, resync="sum")] * 2,
    "mlp-dropped": [desync(True, False, resync="sum")] * 4,
    "nothing-kept": [desync(False, False)] * 4,
    "parallel": [PARALLEL] * 4,
    "standard-ladder-own-standard": [STANDARD, LADDER, OWN, STANDARD],
    "standard-own-ladder-desync": [STANDARD, OWN, LADDER, desync(False, True)],
    "parallel-ladder-desync-ladder": [PARALLEL, LADDER, desync(False, False, resync="sum"), LADDER],
    "parallel-own-parallel-own": [PARALLEL, OWN, PARALLEL, OWN],
    "desync-own-desync-standard": [desync(False, False), OWN, desync(True, False, resync="sum"), STANDARD],
    "own-parallel-desync-ladder": [OWN, PARALLEL, desync(False, True), LADDER],
}
# The parallel blocks of GPT-NeoX are one block per layer: some of the mixes above would change nothing.
ONE_BLOCK = {
    name: [LayerMode(m.mode, m.keep[1:], m.resync) for m in MIXES[name]]
    for name in ("ladder", "own-partial", "desync-4x", "desync-4x-sum", "nothing-kept", "standard-ladder-own-standard")
} | {
    "parallel-own-desync-desync": [PARALLEL, OWN, desync(False), desync(True)],
    "desync-desync-ladder-ladder": [desync(False, resync="sum"), desync(False, resync="sum"), LADDER, LADDER],
    "own-own-ladder-ladder": [OWN, OWN, LADDER, LADDER],
}
CASES = [
    *[("llama", name, 2) for name in MIXES],
    *[("llama", name, 4) for name in ("own-partial", "desync-4x-sum", "standard-own-ladder-desync")],
    *[("llama_mha_bias", name, 2) for name in MIXES if name.count("-") > 2],
    *[("mixtral", name, 2) for name in ("own-partial", "desync-2x", "desync-4x-sum", "own-parallel-desync-ladder")],
    *[("gpt_neox", name, 2) for name in ONE_BLOCK],
    *[("gpt_neox", name, 4) for name in ("own-partial", "desync-4x", "desync-4x-sum")],
]


@functools.cache
def reference_logits(family: str, name: str, ranks: int) -> torch.Tensor:
    modes = (ONE_BLOCK if family == "gpt_neox" else MIXES)[name]
    with torch.no_grad():
        return PerRankReference(zoo.shared(family), dict(enumerate(modes)), ranks)(zoo.batch(2, 21))


@pytest.mark.parametrize(("family", "name", "ranks"), CASES, ids=str)
@torch.no_grad()
def test_the_reference_equals_ranks_with_slices_of_their_own(family: str, name: str, ranks: int) -> None:
    model, ids = zoo.shared(family), zoo.batch(2, 21)
    modes = (ONE_BLOCK if family == "gpt_neox" else MIXES)[name]
    weights = {n: p.detach().double() for n, p in model.named_parameters()}
    build = gpt_neox if family == "gpt_neox" else llama
    expected = run(build(weights, model.config, ranks, ids), modes, ranks)
    actual = reference_logits(family, name, ranks)
    assert relative_error(actual, model(ids, use_cache=False).logits) >= DIFFERENT
    assert relative_error(actual, expected) <= CLOSE


@torch.no_grad()
def test_modes_differ_from_each_other() -> None:
    """Each pair of these differs in one rule only; a reference that mixed them up would pass no test above."""
    for one, other in itertools.combinations(MIXES, 2):
        results = (reference_logits("llama", name, 2) for name in (one, other))
        assert relative_error(*results) >= DIFFERENT, (one, other)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma2", "mixtral"])
def test_what_does_not_depend_on_ranks_equals_the_table_driven_oracle(family: str) -> None:
    model, ids = zoo.shared(family), zoo.batch(2, 21)
    ladder = PerRankReference(model, {1: LADDER, 3: LADDER}, 4)(ids)
    assert relative_error(ladder, ladder_logits(model, {1, 3}, ids)) <= 1e-6
    assert relative_error(PerRankReference(model, {}, 2)(ids), ladder_logits(model, set(), ids)) <= 1e-6


@torch.no_grad()
@pytest.mark.parametrize("mode", [OWN, desync(False, False), desync(False, False, resync="sum")])
def test_on_one_rank_it_is_the_original(mode: LayerMode) -> None:
    model, ids = zoo.shared("llama"), zoo.batch(2, 21)
    actual = PerRankReference(model, dict.fromkeys(range(4), mode), 1)(ids)
    assert relative_error(actual, model(ids, use_cache=False).logits) <= 1e-6


def test_gradients_reach_the_parameters_of_the_model() -> None:
    """The derivative in every parameter is that of the ranks written out in plain tensors."""
    model, ids, modes = zoo.build("llama_mha_bias"), zoo.batch(2, 21), MIXES["desync-own-desync-standard"]
    PerRankReference(model, dict(enumerate(modes)), 2)(ids).square().mean().backward()
    weights = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}
    run(llama(weights, model.config, 2, ids), modes, 2).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert relative_error(parameter.grad, weights[name].grad) <= 1e-4, name


@torch.no_grad()
def test_norms_untied_per_rank_are_those_of_the_rank() -> None:
    model, ids, name = zoo.shared("llama"), zoo.batch(2, 21), "model.layers.1.post_attention_layernorm.weight"
    mix = {1: desync(False, True)}
    tied = PerRankReference(model, mix, 2)(ids)
    weight = model.get_parameter(name)
    assert torch.equal(PerRankReference(model, mix, 2, untied={name: weight.repeat(2)})(ids), tied)
    ones = {name: torch.cat([weight, 2 * weight])}
    others = {name: torch.cat([2 * weight, weight])}
    assert relative_error(PerRankReference(model, mix, 2, untied=ones)(ids), tied) >= DIFFERENT
    assert relative_error(*(PerRankReference(model, mix, 2, untied=u)(ids) for u in (ones, others))) >= DIFFERENT


@torch.no_grad()
def test_a_block_that_every_rank_computes_in_full_counts_once() -> None:
    """Nothing of the layer is split, so its ranks stay equal, and both resyncs give the original."""
    model, ids = zoo.shared("llama"), zoo.batch(2, 21)
    for resync in ("mean", "sum"):
        mix = {layer: desync(False, False, resync=resync) for layer in range(4)}
        actual = PerRankReference(model, mix, 2, whole=["model"])(ids)
        assert relative_error(actual, model(ids, use_cache=False).logits) <= 1e-6


@pytest.mark.parametrize(
    ("family", "mix", "options", "message"),
    [
        ("llama", {4: LADDER}, {}, r"layers \[4\], the model has 0 to 3"),
        ("llama", {0: desync(True)}, {}, r"layer 0 has 2 blocks, keep=\(True,\) is about 1"),
        ("llama", {0: OWN}, {"whole": ["model.layers.0.mlp"]}, "the ranks would drift apart"),
        ("olmo2", {0: LayerMode("parallel", norm="mlp")}, {}, "layer 0 has no one norm at the entry"),
    ],
)
def test_what_it_cannot_be_a_reference_for_is_refused(
    family: str, mix: dict[int, LayerMode], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RewriterError, match=message):
        PerRankReference(zoo.shared(family), mix, 2, **options)


def test_features_that_do_not_divide_are_refused() -> None:
    with pytest.raises(RewriterError, match=r"self_attn.o_proj has 64 input features, which do not divide by 3"):
        PerRankReference(zoo.shared("llama"), {0: desync(False, True)}, 3)

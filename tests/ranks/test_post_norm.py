"""Norms after the reduction (Gemma 2 and 3, OLMo 2) in layers where ranks keep residuals of their own.

The oracle is Gemma 2 written out in float64: P ranks with their own rows and columns of the checkpoint, and N the norm
after a block. A rank alone adds N(f_r); where a sum is complete, N(Σ f_r) is added.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import zoo
from emitted_ranks import on_rank
from oracles import relative_error
from per_rank_wiring import OWN, all_reduce, desync, part, rotate
from per_rank_wiring_ranks import check
from programs import Step, runtime_case, tensor_parallel, traced, weights
from ranks import run_ranks
from torch import fx
from torch.nn.functional import gelu, linear

from rewriter.check.per_rank_reference import LayerMode, PerRankReference
from rewriter.common.errors import RewriterError
from rewriter.ir import Program, ops
from rewriter.ir.communication import by_layer, collectives
from rewriter.ir.marks import marks
from rewriter.ir.simulate import simulate

CLOSE, DIFFERENT = 1e-5, 1e-2
KEPT = {  # of the reductions of two layers, which are kept
    "2x": [(False, True), (False, True)],
    "4x": [(False, False), (False, True)],
}


class Gemma2:
    """The blocks of Gemma 2 as `ranks` ranks hold them, their norms, and what stands around the layers."""

    def __init__(self, w: Mapping[str, torch.Tensor], config: Any, ranks: int) -> None:
        self.w, self.config, self.ranks = w, config, ranks
        self.layers = range(config.num_hidden_layers)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt() * (1 + self.w[name])

    def norm_after(self, block: int, x: torch.Tensor) -> torch.Tensor:
        name = "post_feedforward_layernorm" if block % 2 else "post_attention_layernorm"
        return self.norm(x, f"model.layers.{block // 2}.{name}.weight")

    def parts(self, block: int, x: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """f_r(x_r) of every rank, before the norm after it."""
        return [(self.mlp if block % 2 else self.attention)(block // 2, r, x[r]) for r in range(self.ranks)]

    def attention(self, layer: int, rank: int, stream: torch.Tensor) -> torch.Tensor:
        c, at = self.config, f"model.layers.{layer}."
        x = self.norm(stream, at + "input_layernorm.weight")
        mine = part(torch.arange(c.num_attention_heads), 0, rank, self.ranks)

        def heads(name: str, chosen: torch.Tensor) -> torch.Tensor:
            weight = self.w[f"{at}self_attn.{name}.weight"].unflatten(0, (-1, c.head_dim))[chosen]
            return linear(x, weight.flatten(0, 1)).unflatten(-1, (-1, c.head_dim)).transpose(1, 2)

        serving = mine // (c.num_attention_heads // c.num_key_value_heads)
        base = c.rope_parameters["rope_theta"]
        q, k = rotate(heads("q_proj", mine), c.head_dim, base), rotate(heads("k_proj", serving), c.head_dim, base)
        scores = q @ k.transpose(-1, -2) * c.query_pre_attn_scalar**-0.5
        scores = torch.tanh(scores / c.attn_logit_softcapping) * c.attn_logit_softcapping
        distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        window = c.sliding_window if c.layer_types[layer] == "sliding_attention" else x.shape[1]
        scores = scores.masked_fill((distance < 0) | (distance >= window), float("-inf"))
        attended = (scores.softmax(-1) @ heads("v_proj", serving)).transpose(1, 2).flatten(2)
        return linear(attended, part(self.w[at + "self_attn.o_proj.weight"], 1, rank, self.ranks))

    def mlp(self, layer: int, rank: int, stream: torch.Tensor) -> torch.Tensor:
        at = f"model.layers.{layer}."
        x = self.norm(stream, at + "pre_feedforward_layernorm.weight")
        gate, up = (part(self.w[f"{at}mlp.{name}_proj.weight"], 0, rank, self.ranks) for name in ("gate", "up"))
        hidden = gelu(linear(x, gate), approximate="tanh") * linear(x, up)
        return linear(hidden, part(self.w[at + "mlp.down_proj.weight"], 1, rank, self.ranks))

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:
        return self.w["model.embed_tokens.weight"][ids] * self.config.hidden_size**0.5

    def head(self, x: torch.Tensor) -> torch.Tensor:
        cap = self.config.final_logit_softcapping
        logits = linear(self.norm(x, "model.norm.weight"), self.w["model.embed_tokens.weight"])
        return torch.tanh(logits / cap) * cap


def desynced(m: Gemma2, ids: torch.Tensor, kept: Sequence[bool], resync: str) -> torch.Tensor:
    x, whole = [m.embedding(ids)] * m.ranks, m.embedding(ids)  # whole: with every sum complete
    for block in range(2 * len(m.layers)):
        f = m.parts(block, x)
        whole = whole + m.norm_after(block, all_reduce(f))
        if not kept[block % len(kept)]:
            x = [a + m.norm_after(block, b) for a, b in zip(x, f, strict=True)]
            continue
        if resync == "mean":
            whole = torch.stack(x).mean(0) + m.norm_after(block, all_reduce(f))
        x = [whole] * m.ranks
    return m.head(whole)


def own_partial(m: Gemma2, ids: torch.Tensor) -> torch.Tensor:
    before = after = m.embedding(ids)  # the stream before and after the last block
    own = [torch.zeros_like(after)] * m.ranks
    for block in range(2 * len(m.layers)):
        f = m.parts(block, [before + part for part in own])
        own = [m.norm_after(block, part) for part in f]
        before, after = after, after + m.norm_after(block, all_reduce(f))
    return m.head(after)


def plain(ranks: int) -> Gemma2:
    model = zoo.shared("gemma2")
    return Gemma2({n: p.detach().double() for n, p in model.named_parameters()}, model.config, ranks)


def modes(pattern: str, resync: str) -> dict[int, LayerMode]:
    return {layer: desync(*KEPT[pattern][layer % 2], resync=resync) for layer in range(4)}


# What it is


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@torch.no_grad()
def test_the_reference_equals_ranks_written_out(ranks: int) -> None:
    model, ids = zoo.shared("gemma2"), zoo.batch(2, 21)
    found = {}
    for pattern, layers in KEPT.items():
        kept = [keep for layer in layers for keep in layer]
        for resync in ("mean", "sum"):
            found[pattern, resync] = PerRankReference(model, modes(pattern, resync), ranks)(ids)
            expected = desynced(plain(ranks), ids, kept, resync)
            assert relative_error(found[pattern, resync], expected) <= CLOSE, (pattern, resync)
    found["own"] = PerRankReference(model, dict.fromkeys(range(4), OWN), ranks)(ids)
    assert relative_error(found["own"], own_partial(plain(ranks), ids)) <= CLOSE
    found["original"] = model(ids, use_cache=False).logits
    for i, (name, logits) in enumerate(found.items()):
        assert all(relative_error(logits, other) >= DIFFERENT for other in list(found.values())[:i]), name


@pytest.mark.parametrize("mode", [OWN, desync(False, False), desync(False, False, resync="sum")])
@torch.no_grad()
def test_on_one_rank_it_is_the_original(mode: LayerMode) -> None:
    model, ids = zoo.shared("gemma2"), zoo.batch(2, 21)
    actual = PerRankReference(model, dict.fromkeys(range(4), mode), 1)(ids)
    assert relative_error(actual, model(ids, use_cache=False).logits) <= CLOSE


REWRITES: Mapping[str, tuple[Step, LayerMode]] = {
    "2x": (("desync", {"n": 2}), desync(False, True)),
    "2x-sum": (("desync", {"n": 2, "resync": "sum"}), desync(False, True, resync="sum")),
    "drop-sync": (("drop_sync", {"layers": "all"}), desync(False, True, resync="sum")),
    "own": (("ladder", {"variant": "own_partial"}), OWN),
}
# what desync sums is told apart by Gemma 2; the others have norms of heads, and none before their blocks
CASES = [
    *[("gemma2", name) for name in REWRITES],
    *[("gemma3_text", name) for name in ("2x-sum", "own")],
    *[("olmo2", name) for name in ("2x", "2x-sum")],
]


@functools.cache
def rewritten(family: str, name: str, ranks: int = 2, *steps: str) -> Program:
    return tensor_parallel(traced(family), ranks, REWRITES[name][0], *[(step, {}) for step in steps])


@pytest.mark.parametrize(("family", "name"), CASES, ids=str)
@torch.no_grad()
@pytest.mark.fast("gemma2-2x", "gemma3_text-2x-sum", "gemma3_text-own")
def test_the_program_equals_the_reference(family: str, name: str) -> None:
    ids, layers = zoo.batch(2, 21), range(zoo.config(family).num_hidden_layers)
    expected = PerRankReference(zoo.shared(family), dict.fromkeys(layers, REWRITES[name][1]), 2)(ids)
    for steps in ((), ("overlap",)):
        actual = simulate(rewritten(family, name, 2, *steps), ids, weights=weights(family))
        assert relative_error(actual, expected) <= CLOSE


def test_one_all_reduce_takes_all_that_is_summed() -> None:
    """A layer of Gemma 2 on two ranks sends two vectors of 64 in fp32, in one message."""
    for name in ("2x", "2x-sum"):
        for layer in by_layer(collectives(rewritten("gemma2", name))).values():
            assert (layer.collectives, layer.bytes_per_token) == (1, 2 * 64 * 4), name


def test_a_mean_of_the_stream_is_not_quantized() -> None:
    quantize = ("quantize_collectives", {"format": "int8"})
    tensor_parallel(traced("gemma2"), 2, REWRITES["2x-sum"][0], quantize)
    for steps in ([REWRITES["2x"][0], quantize], [quantize, REWRITES["2x"][0]]):
        with pytest.raises(RewriterError, match="carries the residual stream itself"):
            tensor_parallel(traced("gemma2"), 2, *steps)


def test_attention_that_reduces_inside_reads_no_residual_of_a_rank_s_own() -> None:
    with pytest.raises(RewriterError, match=r"self_attn.q_norm .* reduces over the ranks inside"):
        rewritten("olmo2", "own")


# On ranks: logits, every gradient, greedy tokens with a cache

ON_RANKS = {
    "own partial": [("ladder", {"variant": "own_partial"})],
    "4x, sum, untied norms": [("desync", {"n": 4, "resync": "sum", "untie_norms": True})],
}


def test_two_ranks_equal_the_simulation() -> None:
    check("gemma2", 2, ON_RANKS, new_tokens=4)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_of_other_families_equal_the_simulation(ranks: int) -> None:
    check("gemma3_text", ranks, ON_RANKS)
    check("olmo2", ranks, {name: [REWRITES[name][0]] for name in ("2x", "2x-sum")})


# Faults


def norms_of_parts(graph: fx.Graph) -> list[fx.Node]:
    """The norms after blocks that are given what a rank's attention or MLP returns."""
    calls = [n for n in graph.nodes if n.op == "call_module" and ".post_" in str(n.target)]
    return [n for n in calls if n.all_input_nodes[0].op == "call_module"]


def added_as_it_is(graph: fx.Graph) -> None:
    """A rank adds its own part without the norm."""
    for node in norms_of_parts(graph):
        node.replace_all_uses_with(node.all_input_nodes[0])


def own_part_for_the_sum(graph: fx.Graph) -> None:
    """Where the sum is complete, a rank's own norm of its part is added all the same."""
    agreed = next(n for n in graph.nodes if n.target is ops.agreed)
    agreed.replace_all_uses_with(norms_of_parts(graph)[0])


def sums_exchanged(graph: fx.Graph) -> None:
    """Attention's norm is given the MLP's sum, and vice versa."""
    pieces = [n for n in graph.nodes if n.target is operator.getitem and marks(n).writes is not None]
    for piece in pieces:
        piece.args = (piece.args[0], 1 - piece.args[1])


def carried_forgotten(graph: fx.Graph) -> None:
    """What waited for its sum is not added."""
    agreed = next(n for n in graph.nodes if n.target is ops.agreed)
    total = next(iter(agreed.users))
    total.replace_all_uses_with(next(n for n in total.all_input_nodes if n is not agreed))


FAULTS = [
    ("2x", added_as_it_is),
    ("2x", sums_exchanged),
    ("2x-sum", added_as_it_is),
    ("2x-sum", own_part_for_the_sum),
    ("2x-sum", sums_exchanged),
    ("2x-sum", carried_forgotten),
    ("own", added_as_it_is),
    ("own", own_part_for_the_sum),
]


@pytest.mark.parametrize(("name", "fault"), FAULTS, ids=lambda value: getattr(value, "__name__", value))
@torch.no_grad()
def test_faults_are_noticed(name: str, fault: Callable[[fx.Graph], None]) -> None:
    program, ids = rewritten("gemma2", name), zoo.batch(2, 21)
    expected = PerRankReference(zoo.shared("gemma2"), dict.fromkeys(range(4), REWRITES[name][1]), 2)(ids)
    graph, _ = program.edit()
    fault(graph)
    try:
        actual = simulate(program.with_(graph=graph), ids, weights=weights("gemma2"))
    except RewriterError as error:
        assert "a reduction is missing" in str(error)  # noqa: PT017
        return
    assert relative_error(actual, expected) >= DIFFERENT


def test_a_gradient_that_is_not_shared_is_noticed() -> None:
    """Without `agreed` every rank passes on all of the gradient, and their sum is P times too large."""
    program, ids = rewritten("gemma2", "2x-sum", 2, "overlap"), zoo.batch(2, 13)
    right = runtime_case(program, weights("gemma2"))
    wrong = (right[0].replace("agreed(post_attention_layernorm, self.tp)", "post_attention_layernorm"), *right[1:])
    assert wrong[0] != right[0]
    good, bad = run_ranks(on_rank, 2, [right, wrong], ids, zoo.prompts(1, 256), 1)[0]
    assert torch.equal(good[0], bad[0])
    name = "model.layers.0.post_attention_layernorm.weight"
    assert relative_error(bad[1][name], good[1][name]) >= DIFFERENT

"""What random programs have found wrong, each as the smallest program that shows it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import draws
import emitted
import pytest
import torch
import zoo
from emitted_ranks import compare_gradients, on_rank
from oracles import greedy_oracle, relative_error
from programs import runtime_case, traced
from ranks import run_ranks
from transformers import AutoConfig, PreTrainedConfig

from rewriter.check.per_rank_reference import LayerMode, PerRankReference
from rewriter.emit.huggingface import emit_huggingface
from rewriter.emit.module import emit_runtime_module
from rewriter.passes import available
from rewriter.passes.base import Pass
from rewriter.tracing import trace

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": 256, "pad_token_id": 0}
NORMED = SIZES | {"num_key_value_heads": 2, "head_dim": 8}  # of a Gemma 2, with norms after reductions
RANKS, TOKENS = 2, 4
ladder, desync = available()["ladder"], available()["desync"]


def check(config: PreTrainedConfig, steps: Sequence[Pass], modes: Mapping[int, LayerMode]) -> None:
    """Logits, gradients and text of a random model on real ranks, rewritten by `steps` in this order, are the
    reference's of these modes."""
    model = draws.build(draws.Architecture(config, RANKS, divides=True), 0)
    rewritten = available()["tensor_parallel"]().apply(trace(config).with_(mesh={"tp": RANKS}))
    for step in steps:
        rewritten = step.apply(rewritten)
    full = {name: p.detach() for name, p in model.named_parameters()}
    ids, prompts = zoo.batch(2, 21, 256), zoo.prompts(3, 256)
    by_rank = run_ranks(on_rank, RANKS, [runtime_case(rewritten, full)], ids, prompts, TOKENS)
    reference = PerRankReference(model, modes, RANKS)
    expected = reference(ids)
    expected.square().mean().backward()
    assert relative_error(by_rank[0][0][0], expected.detach()) <= 1e-5
    with torch.no_grad():
        assert by_rank[0][0][2] == greedy_oracle(reference, prompts, TOKENS)
    compare_gradients(rewritten, [rank[0][1] for rank in by_rank], model)


@pytest.mark.parametrize("first", ["ladder", "own_partial"])
def test_passes_have_the_same_gradients_on_ranks_in_either_order(first: str) -> None:
    """Of an own-partial layer whose predecessor became a ladder layer later, gradients of all below were wrong."""
    config = AutoConfig.for_model("llama", num_hidden_layers=3, intermediate_size=64, **SIZES)
    steps = {"ladder": ladder([1]), "own_partial": ladder([2], variant="own_partial")}
    modes = {layer: LayerMode(mode) for layer, mode in enumerate(("standard", "ladder", "own_partial"))}
    check(config, [steps[name] for name in sorted(steps, key=lambda name: name != first)], modes)


@pytest.mark.parametrize("first", ["desync", "own_partial"])
@pytest.mark.fast("own_partial")
def test_a_norm_has_the_same_gradient_in_either_order(first: str) -> None:
    """Of Gemma 2's norm after a reduction that desync keeps, below a layer that read the rank's own part of it before:
    its weight got P times its gradient."""
    config = AutoConfig.for_model("gemma2", num_hidden_layers=3, intermediate_size=64, **NORMED)
    steps = {
        "desync": desync([1], n=None, pattern=(("drop", "keep"),), resync="mean"),
        "own_partial": ladder([2], variant="own_partial"),
    }
    modes = {1: LayerMode("desync", (False, True), resync="mean"), 2: LayerMode("own_partial")}
    check(config, [steps[name] for name in sorted(steps, key=lambda name: name != first)], modes)


def test_a_program_that_was_not_split_is_emitted_without_its_dropout() -> None:
    """GPT-NeoX's layers call modules of dropout; the module that was emitted of one rank called them and had none."""
    program = traced("gpt_neox")
    assert "dropout" in str(program)
    assert "dropout" not in emit_runtime_module(ladder([1]).apply(program))


def test_what_ranks_add_in_full_crosses_layers(tmp_path: Path) -> None:
    """Gemma 2's MLP of 57 channels is computed in full by two ranks, and what they add waits for the next layer's
    reduction: the adapted checkpoint named it where it was used alone."""
    config = AutoConfig.for_model("gemma2", num_hidden_layers=4, intermediate_size=57, **NORMED)
    drawn = draws.Architecture(config, 2, divides=False)
    model = draws.build(drawn, 0)
    model.save_pretrained(tmp_path / "source")
    keep = {0: (False, False), 1: (False, False), 2: (True, False)}
    mix = draws.Mix(2, (((0, 1, 2), LayerMode("desync", resync="sum")),), keep)
    rewritten = draws.rewrite(random.Random(0), trace(tmp_path / "source"), drawn, mix)
    emitted.write(emit_huggingface(rewritten), tmp_path / "source", tmp_path / "adapted")
    adapted = emitted.load(tmp_path / "adapted")
    ids = zoo.batch(2, 21, 256)
    with torch.no_grad():
        expected = PerRankReference(model, mix.modes(), 2, whole=drawn.whole(2))(ids)
        assert relative_error(adapted(ids).logits, expected) <= 1e-5


@pytest.mark.slow
def test_a_sum_may_wait_for_a_reduction_two_layers_later() -> None:
    """Norms of three layers are applied where their sums are complete; the module of a rank was refused."""
    config = AutoConfig.for_model("gemma2", num_hidden_layers=4, intermediate_size=64, **NORMED)
    kept = {0: (False, False), 1: (False, False), 2: (False, True)}
    modes = {layer: LayerMode("desync", kept[layer], resync="sum") for layer in kept}
    check(config, [desync([0, 1, 2], n=6, resync="sum")], modes)

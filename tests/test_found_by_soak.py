"""What random programs have found wrong, each as the smallest program that shows it."""

from __future__ import annotations

import random
from pathlib import Path

import draws
import emitted
import pytest
import torch
import zoo
from oracles import greedy_oracle, relative_error
from programs import runtime_case, traced
from ranks import run_ranks
from test_emitted_runtime import compare_gradients, on_rank
from transformers import AutoConfig

from rewriter.emit.huggingface import emit_huggingface
from rewriter.emit.runtime_module import emit_runtime_module
from rewriter.passes import available
from rewriter.tracing import trace
from rewriter.verify.per_rank_reference import LayerMode, PerRankReference

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": 256, "pad_token_id": 0}


@pytest.mark.parametrize("first", ["ladder", "own_partial"])
def test_passes_have_the_same_gradients_on_ranks_in_either_order(first: str) -> None:
    """Of an own-partial layer whose predecessor became a ladder layer later, gradients of all below were wrong."""
    config = AutoConfig.for_model("llama", num_hidden_layers=3, intermediate_size=64, **SIZES)
    model = draws.build(draws.Architecture(config, 2, divides=True), 0)
    passes = available()
    steps = {"ladder": passes["ladder"]([1]), "own_partial": passes["ladder"]([2], variant="own_partial")}
    rewritten = passes["tensor_parallel"]().apply(trace(config).with_(mesh={"tp": 2}))
    for name in sorted(steps, key=lambda name: name != first):
        rewritten = steps[name].apply(rewritten)
    full = {name: p.detach() for name, p in model.named_parameters()}
    ids, prompts = zoo.batch(2, 21, 256), zoo.prompts(3, 256)
    by_rank = run_ranks(on_rank, 2, [runtime_case(rewritten, full)], ids, prompts, 2, timeout=240)
    modes = {layer: LayerMode(mode) for layer, mode in enumerate(("standard", "ladder", "own_partial"))}
    expected = PerRankReference(model, modes, 2)(ids)
    expected.square().mean().backward()
    assert relative_error(by_rank[0][0][0], expected.detach()) <= 1e-5
    compare_gradients(rewritten, [rank[0][1] for rank in by_rank], model)


@pytest.mark.parametrize("first", ["desync", "own_partial"])
def test_a_norm_has_the_same_gradient_in_either_order(first: str) -> None:
    """Of Gemma 2's norm after a reduction that desync keeps, below a layer that read the rank's own part of it before:
    its weight got P times its gradient."""
    config = AutoConfig.for_model(
        "gemma2", num_hidden_layers=3, intermediate_size=64, num_key_value_heads=2, head_dim=8, **SIZES
    )
    model = draws.build(draws.Architecture(config, 2, divides=True), 0)
    passes = available()
    steps = {
        "desync": passes["desync"]([1], n=None, pattern=(("drop", "keep"),), resync="mean"),
        "own_partial": passes["ladder"]([2], variant="own_partial"),
    }
    rewritten = passes["tensor_parallel"]().apply(trace(config).with_(mesh={"tp": 2}))
    for name in sorted(steps, key=lambda name: name != first):
        rewritten = steps[name].apply(rewritten)
    full = {name: p.detach() for name, p in model.named_parameters()}
    ids, prompts = zoo.batch(2, 21, 256), zoo.prompts(3, 256)
    by_rank = run_ranks(on_rank, 2, [runtime_case(rewritten, full)], ids, prompts, 2, timeout=240)
    modes = {1: LayerMode("desync", (False, True), resync="mean"), 2: LayerMode("own_partial")}
    expected = PerRankReference(model, modes, 2)(ids)
    expected.square().mean().backward()
    assert relative_error(by_rank[0][0][0], expected.detach()) <= 1e-5
    compare_gradients(rewritten, [rank[0][1] for rank in by_rank], model)


def test_a_program_that_was_not_split_is_emitted_without_its_dropout() -> None:
    """GPT-NeoX's layers call modules of dropout; the module that was emitted of one rank called them and had none."""
    program = traced("gpt_neox")
    assert "dropout" in str(program)
    assert "dropout" not in emit_runtime_module(available()["ladder"]([1]).apply(program))


def test_what_ranks_add_in_full_crosses_layers(tmp_path: Path) -> None:
    """Gemma 2's MLP of 57 channels is computed in full by two ranks, and what they add waits for the next layer's
    reduction: the adapted checkpoint named it where it was used alone."""
    config = AutoConfig.for_model(
        "gemma2", num_hidden_layers=4, intermediate_size=57, num_key_value_heads=2, head_dim=8, **SIZES
    )
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


def test_a_sum_may_wait_for_a_reduction_two_layers_later() -> None:
    """Norms of three layers are applied where their sums are complete; the module of a rank was refused."""
    config = AutoConfig.for_model(
        "gemma2", num_hidden_layers=4, intermediate_size=64, num_key_value_heads=2, head_dim=8, **SIZES
    )
    model = draws.build(draws.Architecture(config, 2, divides=True), 0)
    passes = available()
    rewritten = passes["tensor_parallel"]().apply(trace(config).with_(mesh={"tp": 2}))
    rewritten = passes["desync"]([0, 1, 2], n=6, resync="sum").apply(rewritten)
    full = {name: p.detach() for name, p in model.named_parameters()}
    ids, prompts = zoo.batch(2, 21, 256), zoo.prompts(3, 256)
    by_rank = run_ranks(on_rank, 2, [runtime_case(rewritten, full)], ids, prompts, 4, timeout=240)
    kept = {0: (False, False), 1: (False, False), 2: (False, True)}
    modes = {layer: LayerMode("desync", kept[layer], resync="sum") for layer in kept}
    reference = PerRankReference(model, modes, 2)
    expected = reference(ids)
    expected.square().mean().backward()
    assert relative_error(by_rank[0][0][0], expected.detach()) <= 1e-5
    with torch.no_grad():
        assert by_rank[0][0][2] == greedy_oracle(reference, prompts, 4)
    compare_gradients(rewritten, [rank[0][1] for rank in by_rank], model)

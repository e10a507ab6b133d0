"""Random architectures × random mixes of layers: what the passes make equals the reference, on 1, 2 and 4 ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import draws
import emitted
import pytest
import torch
import zoo
from oracles import greedy_oracle, relative_error
from transformers import AutoConfig

from rewriter.check.per_rank_reference import LayerMode, PerRankReference
from rewriter.emit.huggingface import emit_huggingface
from rewriter.ir.simulate import simulate
from rewriter.recipes.apply import lint
from rewriter.tracing import trace

SAME = 1e-5
DIFFERENT = 1e-2


def check(family: str, seed: int, mixes: int) -> None:
    """`mixes` random mixes of a random architecture of `family` equal the reference at each number of ranks."""
    rng = random.Random(f"{family} {seed}")
    drawn = draws.architecture(rng, family)
    check_mixes(rng, drawn, [draws.mix(rng, drawn, (2, 4, 1)[(seed + number) % 3]) for number in range(mixes)], seed)


@torch.no_grad()
def check_mixes(rng: random.Random, drawn: draws.Architecture, mixes: Sequence[draws.Mix], seed: int = 0) -> None:
    model, program = draws.build(drawn, seed), trace(drawn.config)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    ids = zoo.batch(2, 21, drawn.config.vocab_size, seed)
    original = model(input_ids=ids, use_cache=False).logits
    for chosen in mixes:
        rewritten = draws.rewrite(rng, program, drawn, chosen)
        lint(rewritten, "the last pass")
        reference = PerRankReference(model, chosen.modes(), chosen.ranks, whole=drawn.whole(chosen.ranks))
        expected = reference(ids)
        case = f"{drawn.config}\n{chosen}"
        changed = any(step.since < b or (step.split and not step.keep) for b, step in enumerate(reference.steps))
        difference = relative_error(expected, original)
        assert difference >= DIFFERENT if changed else difference <= SAME, case
        assert relative_error(simulate(rewritten, ids, weights=weights), expected) <= SAME, case


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize("family", draws.ALL_FAMILIES[::2])
def test_random_mixes_of_random_architectures_equal_the_reference(family: str, seed: int) -> None:
    check(family, seed, mixes=3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(9))
@pytest.mark.parametrize("family", draws.ALL_FAMILIES)
def test_many_random_mixes_of_random_architectures_equal_the_reference(family: str, seed: int) -> None:
    check(family, seed, mixes=6)


def test_what_follows_a_desynced_layer_starts_drained_also_after_a_block_that_reduces_nothing() -> None:
    """The MLP of 57 channels is computed in full by both ranks, after the last reduction of the desynced layers."""
    sizes = {"hidden_size": 32, "intermediate_size": 57, "num_attention_heads": 4, "vocab_size": 256}
    config = AutoConfig.for_model("llama", num_hidden_layers=3, pad_token_id=0, **sizes)
    runs = (((0, 1), LayerMode("desync", resync="sum")), ((2,), LayerMode("ladder")))
    chosen = draws.Mix(2, runs, dict.fromkeys((0, 1), (False, False)))
    check_mixes(random.Random(0), draws.Architecture(config, 2, divides=False), [chosen])


# With a cache


def check_generation(family: str, seed: int, ranks: int, directory: Path, tokens: int = 8) -> None:
    """The adapted checkpoint of a random mix writes, with its cache, what recomputing with the reference gives."""
    rng = random.Random(f"{family} {seed} generation")
    drawn = draws.architecture(rng, family, ranks)
    while not drawn.equal_runs(ranks):  # on one device, ranks hold equal parts of a projection
        drawn = draws.architecture(rng, family, ranks)
    model, chosen = draws.build(drawn, seed), draws.mix(rng, drawn, ranks)
    model.save_pretrained(directory / "source")
    rewritten = draws.rewrite(rng, trace(directory / "source"), drawn, chosen)
    emitted.write(emit_huggingface(rewritten), directory / "source", directory / "adapted")
    adapted = emitted.load(directory / "adapted")
    for layer, blocks in enumerate(adapted.config.rewriter_pattern or []):
        mode = chosen.modes()[layer].mode
        assert mode == "desync" or set(blocks.values()) == {mode}
    reference = PerRankReference(model, chosen.modes(), ranks, whole=drawn.whole(ranks))
    prompts = zoo.prompts(3, drawn.config.vocab_size)
    with torch.no_grad():
        expected = greedy_oracle(reference, prompts, tokens)
    inputs = emitted.left_padded(prompts)
    text = adapted.generate(**inputs, max_new_tokens=tokens, do_sample=False, use_cache=True)
    assert text[:, inputs["input_ids"].shape[1] :].tolist() == expected, f"{drawn.config}\n{chosen}"


@pytest.mark.parametrize(("family", "ranks"), [("llama", 1), ("gpt2", 4), ("gemma2", 2), ("granite", 2)])
def test_adapted_checkpoints_write_with_a_cache_what_the_reference_gives(
    family: str, ranks: int, tmp_path: Path
) -> None:
    check_generation(family, 0, ranks, tmp_path)


# The per-rank residuals of experts are not computed on one device: such checkpoints are refused.
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        *[(family, 1) for family in draws.ALL_FAMILIES],
        *[(family, ranks) for family in draws.FAMILIES if family not in draws.EXPERTS for ranks in (2, 4)],
    ],
)
def test_many_adapted_checkpoints_write_with_a_cache_what_the_reference_gives(
    family: str, ranks: int, seed: int, tmp_path: Path
) -> None:
    check_generation(family, seed, ranks, tmp_path, tokens=24)

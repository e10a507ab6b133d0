"""Searches that rewire the prompt alone: what is measured, what is gained, and what is found."""

from __future__ import annotations

from pathlib import Path

import pytest
import searched
import torch

from rewriter.common.errors import RewriterError
from rewriter.ir import Program
from rewriter.ir.phases import PromptPhase
from rewriter.ir.simulate import load_weights, simulate
from rewriter.passes.phases import both_wirings
from rewriter.passes.quantize_collectives import always_quantized
from rewriter.predict.search import choices
from rewriter.predict.search.choices import PROMPT, REWRITES, Mix, Part, recipe_of
from rewriter.predict.search.computed import Computed, rewired
from rewriter.predict.search.gains import Gains
from rewriter.predict.search.run import Asked, opened, search
from rewriter.predict.workload import Cluster, Workload
from rewriter.recipes import Recipe
from rewriter.recipes.apply import apply_recipe

RANKS, TOKENS = 3, 24
IDS = torch.randint(131, (TOKENS,), generator=torch.Generator().manual_seed(1))
LONG = Workload(tp=RANKS, sp=1, prompt=8192, generate=16)


# --- choices ---


def test_rewrites_and_formats_of_the_prompt_are_recipes_of_their_phase() -> None:
    mix = searched.mix("drop@0", "prompt-drop@1", "prompt-desync-4x@2", "int8@0", "prompt-int8@1", "prompt-int8@2")
    recipe = recipe_of(mix)
    passes = [(p.pass_name, p.options) for p in recipe.passes if p.options]
    assert passes == [
        ("drop_sync", {"layers": [0]}),
        ("drop_sync", {"phase": "prompt", "layers": [1]}),
        ("desync", {"n": 4, "resync": "sum", "phase": "prompt", "layers": "2-3"}),
        ("quantize_collectives", {"format": "int8", "layers": [0]}),
        ("quantize_collectives", {"format": "int8", "layers": "1-2", "phase": "prompt"}),
    ]
    assert Recipe.parse(recipe.to_yaml()).build() == recipe.build()
    prompt = [name.removeprefix(PROMPT) for name, rewrite in REWRITES.items() if rewrite.prompt]
    assert prompt == [name for name, rewrite in REWRITES.items() if not rewrite.prompt]


# --- what is measured ---

MIXES = [
    ("prompt-ladder@1", "prompt-own-partial@3", "prompt-parallel@5"),
    ("prompt-drop@0", "prompt-parallel-own@2", "prompt-int8@4"),
    ("drop@0", "prompt-desync-4x@2", "int8@1", "prompt-drop-mlp@4"),
    ("drop@0", "prompt-int8@0", "prompt-drop@2", "int8@2"),
]


@pytest.mark.parametrize("words", MIXES, ids=" ".join)
def test_a_mix_is_measured_on_tokens_after_its_prompt(
    program: Program, computed: Computed, words: tuple[str, ...]
) -> None:
    """Against the whole model in the wiring of both phases, the prompt being the first half: written out."""
    mix, weights, prompt = searched.mix(*words), load_weights(program), TOKENS // 2
    rewritten, _ = apply_recipe(program, recipe_of(mix), RANKS)
    whole = always_quantized(both_wirings(rewritten))
    of_prompt = torch.arange(TOKENS)[None] < prompt - 1
    logits = [
        simulate(program, IDS[None], weights=weights),
        simulate(whole, IDS[None], weights=weights, rewired=of_prompt),
    ]
    old, new = (x[0].double().log_softmax(-1)[prompt - 1 :] for x in logits)
    divergence = float((old.exp() * (old - new)).sum())
    loss = [-float(x[:-1].gather(-1, IDS[prompt:, None]).sum()) for x in (old, new)]
    (found,) = computed.changes([computed.part(mix)], IDS)
    assert (found.tokens, found.predicted) == (TOKENS - prompt + 1, TOKENS - prompt)
    assert divergence > 1e-3
    assert found.divergence == pytest.approx(divergence, rel=2e-3, abs=2e-4)
    assert found.rise == pytest.approx(loss[1] - loss[0], rel=2e-3, abs=1e-3)


def test_nothing_reads_what_the_prompt_leaves_after_the_last_attention(computed: Computed) -> None:
    last = searched.LAYERS - 1
    parts = [computed.part(searched.mix(f"{name}@{last}")) for name in ("prompt-drop", "drop", "prompt-ladder")]
    of_prompt, of_all, ladder = computed.changes(parts, IDS)
    assert of_prompt.divergence == pytest.approx(0, abs=1e-5)
    assert of_all.divergence > 0.1
    assert ladder.divergence > 1e-3  # its attention reads another stream, so keys and values are others


def test_a_window_without_a_prompt_to_rewire_is_refused() -> None:
    with pytest.raises(RewriterError, match=r"a window of 16 tokens has a prompt of 8.*longer text"):
        rewired(PromptPhase(exact_tail=8), 16)


# --- what is gained ---


def test_a_rewrite_of_the_prompt_gains_what_is_said(program: Program) -> None:
    """Without what two calls for the prefill change, which counts once in a mix."""
    gains = Gains(program, LONG, Cluster("pcie-gen4"))
    gain = gains.gain("prompt-drop", range(searched.LAYERS - 1))
    two, three = (gains.speed(Mix(tuple(Part(n, "prompt-drop") for n in some))) for some in ((1, 2), (1, 2, 3)))
    assert gain is not None
    assert two is not None
    assert three is not None
    assert three.decode == gains.standard.decode
    assert gain == pytest.approx(two.seconds - three.seconds, rel=0.01)
    everywhere = gains.speed(searched.mix("drop@1", "drop@2", "drop@3"))
    assert everywhere is not None
    assert everywhere.decode < three.decode


# --- what is found ---


@pytest.mark.slow
def test_a_search_rewires_the_prompt_where_all_tokens_would_cost_too_much(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of dropped reductions, of all tokens or of the prompt: a long prompt over PCIe, and a budget that lets no layer
    drop its own for all tokens."""
    for name in set(REWRITES) - {"drop", "prompt-drop"}:
        monkeypatch.delitem(choices.REWRITES, name)
    asked = Asked(LONG, Cluster("pcie-gen4"), 0.02, windows=(2, 2))
    found = search(directory, asked)
    mix = found.chosen.mix
    assert set(mix.layers) == {"prompt-drop"}
    assert searched.LAYERS - 1 not in mix.touched  # where nothing would be gained
    assert found.chosen.rise.relative <= 0.02
    assert found.chosen.speedup > 1.05
    assert found.chosen.speed.decode == found.standard.decode
    measured, gains = opened(directory, asked)
    everywhere = Mix(tuple(Part(p.start, "drop") for p in mix.parts))
    speed = gains.speed(everywhere)
    assert speed is not None
    assert speed.decode < found.chosen.speed.decode
    assert measured.rises([everywhere])[everywhere].relative > 0.02
    assert {option.part.name for option in found.singles} == {"drop", "prompt-drop"}
    assert any(set(p.mix.layers) == {"drop", "prompt-drop"} for p in found.points)  # both under one budget
    assert "phase: prompt" in found.recipe

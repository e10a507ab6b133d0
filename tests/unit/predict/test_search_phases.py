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
from rewriter.predict.search import measurements, run
from rewriter.predict.search.choices import BY_NAME, PROMPT, REWRITES, Mix, PlacedRewrite, mix_of, recipe_of
from rewriter.predict.search.computed import Computed, CutWindow
from rewriter.predict.search.front import Option, front
from rewriter.predict.search.gains import Gains, gain_of
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
    assert mix.phased
    assert not searched.mix("drop@0", "int8@1").phased
    assert searched.mix("prompt-int8@1").phased
    assert searched.parse(mix.key) == mix
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
    prompt = [r.name.removeprefix(PROMPT) for r in REWRITES if r.prompt]
    assert prompt == [r.name for r in REWRITES if not r.prompt]


# --- what is measured ---

MIXES = [
    ("prompt-ladder@1", "prompt-own-partial@3", "prompt-parallel@5"),
    ("prompt-drop@0", "prompt-parallel-own@2", "prompt-int8@4"),
    ("drop@0", "prompt-desync-4x@2", "int8@1", "prompt-drop-mlp@4"),
]


@pytest.mark.parametrize("words", MIXES, ids=" ".join)
def test_a_mix_is_measured_on_tokens_after_its_prompt(
    program: Program, computed: Computed, words: tuple[str, ...]
) -> None:
    """Against the whole model in the wiring of both phases, the prompt being the first half: written out."""
    mix, weights, prompt = searched.mix(*words), load_weights(program), TOKENS // 2
    rewritten, _ = apply_recipe(program, recipe_of(mix), RANKS)
    whole = always_quantized(both_wirings(rewritten))
    rewired = torch.arange(TOKENS)[None] < prompt - 1
    logits = [
        simulate(program, IDS[None], weights=weights),
        simulate(whole, IDS[None], weights=weights, rewired=rewired),
    ]
    old, new = (x[0].double().log_softmax(-1)[prompt - 1 :] for x in logits)
    divergence = float((old.exp() * (old - new)).sum())
    loss = [-float(x[:-1].gather(-1, IDS[prompt:, None]).sum()) for x in (old, new)]
    (found,) = computed.changes([computed.part(mix)], IDS)
    assert (found.tokens, found.predicted) == (TOKENS - prompt + 1, TOKENS - prompt)
    assert divergence > 1e-3
    assert found.divergence == pytest.approx(divergence, rel=2e-3, abs=2e-4)
    assert found.rise == pytest.approx(loss[1] - loss[0], rel=2e-3, abs=1e-3)
    of_whole = computed.change_of(whole, weights, IDS)
    assert of_whole.divergence == pytest.approx(divergence, rel=1e-4, abs=1e-5)


def test_nothing_reads_what_the_prompt_leaves_after_the_last_attention(computed: Computed) -> None:
    last = searched.LAYERS - 1
    parts = [computed.part(searched.mix(f"{name}@{last}")) for name in ("prompt-drop", "drop", "prompt-ladder")]
    of_prompt, of_all, ladder = computed.changes(parts, IDS)
    assert of_prompt.divergence == pytest.approx(0, abs=1e-5)
    assert of_all.divergence > 0.1
    assert ladder.divergence > 1e-3  # its attention reads another stream, so keys and values are others


def test_a_window_without_a_prompt_to_rewire_is_refused() -> None:
    with pytest.raises(RewriterError, match=r"a window of 16 tokens has a prompt of 8.*longer text"):
        CutWindow.of(PromptPhase(exact_tail=8), 16)


# --- what is gained ---


def test_a_run_of_the_prompt_gains_what_is_said(program: Program) -> None:
    """Placements add up, the cut of the prefill being paid once."""
    gains = Gains(program, LONG, Cluster("pcie-gen4"))
    cut = gains.cut()
    gain = gain_of(gains, "prompt-drop", range(searched.LAYERS - 1), cut=cut)
    assert gain is not None
    each, edge = gain
    speed = gains.speed(mix_of([PlacedRewrite(n, "prompt-drop") for n in (1, 2, 3)]))
    assert speed is not None
    assert speed.decode == gains.standard.decode
    saved = gains.standard.seconds - speed.seconds
    assert 3 * each - edge - cut == pytest.approx(saved, rel=0.01)
    last = gain_of(gains, "prompt-drop", [searched.LAYERS - 1], cut=cut)  # the prompt has no sum there to be dropped
    assert last == pytest.approx((0, 0), abs=1e-9)
    everywhere = gains.speed(mix_of([PlacedRewrite(n, "drop") for n in (1, 2, 3)]))
    assert everywhere is not None
    assert everywhere.decode < speed.decode


def test_the_cut_is_paid_once_by_mixes_that_need_it() -> None:
    options = [Option(n, 1, "prompt-drop", cost=0.1, gain=1.0) for n in range(3)]
    options += [Option(n, 1, "drop", cost=1.0, gain=1.5) for n in range(3)]
    found = {e.mix.key: e.gain for e in front(3, options, cut=0.75)}
    assert found[Mix().key] == 0
    assert found["tensor-parallel prompt-drop@0"] == pytest.approx(0.25)
    assert found["tensor-parallel prompt-drop@0 prompt-drop@1 prompt-drop@2"] == pytest.approx(2.25)
    assert max(found.values()) == found["tensor-parallel drop@0 drop@1 drop@2"] == pytest.approx(4.5)
    assert all(found[key] > 0 for key in found if key != Mix().key)
    cheap = [Option(0, 1, "prompt-drop", cost=0.1, gain=0.5)]
    assert [e.mix for e in front(3, cheap, cut=0.75)] == [Mix()]


# --- what is found ---


@pytest.mark.slow
def test_a_search_rewires_the_prompt_where_all_tokens_would_cost_too_much(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of dropped reductions, of all tokens or of the prompt: a long prompt over PCIe, and a budget that lets no layer
    drop its own for all tokens."""
    chosen_from = [BY_NAME["drop"], BY_NAME["prompt-drop"]]
    monkeypatch.setattr(measurements, "REWRITES", chosen_from)
    monkeypatch.setattr(measurements, "FORMATS", {})
    monkeypatch.setattr(run, "FORMATS", {})
    asked = Asked(LONG, Cluster("pcie-gen4"), 0.02, windows=(2, 2))
    found = search(directory, asked)
    mix = found.chosen.mix
    assert mix.phased
    assert set(mix.counts()) == {"prompt-drop"}
    assert searched.LAYERS - 1 not in mix.touched  # where nothing would be gained
    assert found.chosen.rise.relative <= 0.02
    assert found.chosen.speedup > 1.05
    assert found.chosen.speed.decode == found.standard.decode
    measured, gains = opened(directory, asked)
    everywhere = mix_of([PlacedRewrite(p.start, "drop") for p in mix.placements])
    speed = gains.speed(everywhere)
    assert speed is not None
    assert speed.decode < found.chosen.speed.decode
    assert measured.rises([everywhere])[everywhere].relative > 0.02
    assert {s.rewrite for s in found.singles} == {"drop", "prompt-drop"}
    assert any(set(p.mix.counts()) == {"drop", "prompt-drop"} for p in found.points)  # both under one budget
    assert "phase: prompt" in found.recipe

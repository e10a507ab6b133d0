"""What a search measures is the loss of what is converted: parts against whole models, on three ranks too."""

from __future__ import annotations

from pathlib import Path

import pytest
import searched
import torch

from rewriter.api import convert, load
from rewriter.convert.save_options import SaveOptions
from rewriter.ir import Program
from rewriter.ir.simulate import simulate
from rewriter.passes.phases import both_wirings, single_device
from rewriter.passes.quantize_collectives import always_quantized, is_quantized
from rewriter.predict.search.choices import REWRITES, Mix, Part, recipe_of
from rewriter.predict.search.measured import Effect, Measurements, Store, rise_of, text_for
from rewriter.recipes.apply import apply_recipe

RANKS, TOKENS = 3, 24
PROMPT = TOKENS // 2
IDS = torch.randint(131, (2, TOKENS), generator=torch.Generator().manual_seed(1))


def expected(before: torch.Tensor, after: torch.Tensor, ids: torch.Tensor, since: int = 0) -> tuple[float, float]:
    """(KL, rise in loss), sums over one window from token `since` on, written out."""
    old, new = (logits.double().log_softmax(-1)[since:] for logits in (before, after))
    divergence = (old.exp() * (old - new)).sum()
    loss = [-x[:-1].gather(-1, ids[since + 1 :, None]).sum() for x in (old, new)]
    return float(divergence), float(loss[1] - loss[0])


def converted(program: Program, mix: Mix, ids: torch.Tensor, since: int) -> torch.Tensor:
    """The logits [T, V] of all ranks under the recipe, by the interpreter of whole programs. Where the prompt alone is
    rewired, its last token, `since`, is exact."""
    rewritten, _ = apply_recipe(program, recipe_of(mix), RANKS)
    whole = always_quantized(both_wirings(rewritten)) if is_quantized(rewritten) else single_device(rewritten)
    of_prompt = torch.arange(TOKENS)[None] < since if since else None
    return simulate(whole, ids[None], rewired=of_prompt)[0]


def same(effect: Effect, wanted: tuple[float, float], since: int = 0) -> None:
    kl, rise, _ = effect
    assert kl * (TOKENS - since) == pytest.approx(wanted[0], rel=2e-3, abs=2e-4)
    assert rise * (TOKENS - since - 1) == pytest.approx(wanted[1], rel=2e-3, abs=1e-3)


def check(program: Program, measured: Measurements, mix: Mix) -> float:
    """Compare the mix with what is converted, and return the smaller KL of two windows, nats per window."""
    since = PROMPT - 1 if any(part.rewrite.prompt for part in mix.parts) else 0
    found, least = measured.effects(mix, IDS.tolist()), float("inf")
    for effect, ids in zip(found, IDS, strict=True):
        wanted = expected(simulate(program, ids[None])[0], converted(program, mix, ids, since), ids, since)
        same(effect, wanted, since)
        least = min(least, wanted[0])
    return least


@pytest.mark.slow
def test_each_alone_is_what_the_converted_model_loses(program: Program, measured: Measurements) -> None:
    """At the first layer, in the middle and at the end; for the prompt alone, before the last layer."""
    for name, rewrite in REWRITES.items():
        last = searched.LAYERS - rewrite.layers - rewrite.prompt
        for start in sorted({0, 2, last}):
            if start > last:
                continue
            mix = Mix((Part(start, name),))
            least = check(program, measured, mix)
            if not rewrite.format and name.removeprefix("prompt-") + str(start) != "ladder0":
                assert least > 1e-3, f"{mix.key} changes too little to be told from the original"


MIXES = [
    ("drop@0", "ladder@1", "ladder@2", "own-partial@3", "parallel@4", "int8@2"),
    ("parallel-own@0", "desync-4x@1", "drop-mlp@3", "int4-hadamard@0", "int8@5"),
    ("desync-8x@1", "own-partial@5"),
    ("own-partial@1", "own-partial@2", "drop@3"),
    ("prompt-ladder@1", "prompt-own-partial@3", "prompt-parallel@5"),
    ("prompt-drop@0", "prompt-parallel-own@2", "prompt-int8@4"),
    ("drop@0", "prompt-desync-4x@2", "int8@1", "prompt-drop-mlp@4"),
    ("drop@0", "prompt-int8@0", "prompt-drop@2", "int8@2"),
]


@pytest.mark.parametrize("words", MIXES, ids=" ".join)
def test_a_mix_is_what_the_converted_model_loses(
    program: Program, measured: Measurements, words: tuple[str, ...]
) -> None:
    assert check(program, measured, searched.mix(*words)) > 1e-3


@pytest.mark.parametrize(
    "words", [("ladder@2", "parallel@4"), ("drop@1", "own-partial@4"), ("desync-4x@2", "drop-mlp@0")], ids=" ".join
)
def test_a_mix_is_what_the_emitted_checkpoint_loses(
    directory: Path, program: Program, measured: Measurements, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """The files that `rewrite` writes, loaded by transformers: bound ones compute all three ranks."""
    mix, out = searched.mix(*words), tmp_path / "out"
    convert(directory, recipe_of(mix), out=out, tp=RANKS, options=SaveOptions(verify="none"))
    with torch.no_grad():
        after = load(out, dtype=torch.float32).eval()(input_ids=IDS, use_cache=False).logits
    found = measured.effects(mix, IDS.tolist())
    for effect, ids, old, new in zip(found, IDS, simulate(program, IDS), after, strict=True):
        same(effect, expected(old, new, ids))


@pytest.mark.slow
@pytest.mark.parametrize("words", [("drop@1", "prompt-int8@1"), ("own-partial@3", "prompt-int4-hadamard@3")])
def test_a_layer_with_a_format_for_the_prompt_is_converted(
    directory: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    report = convert(directory, recipe_of(searched.mix(*words)), out=tmp_path / "out", tp=RANKS)
    assert report.verification


def test_nothing_reads_what_the_prompt_leaves_after_the_last_attention(measured: Measurements) -> None:
    last = searched.LAYERS - 1
    mixes = [searched.mix(f"{name}@{last}") for name in ("prompt-drop", "drop", "prompt-ladder")]
    of_prompt, of_all, ladder = (measured.effects(mix, IDS[:1].tolist())[0][0] for mix in mixes)
    assert of_prompt * TOKENS == pytest.approx(0, abs=1e-5)
    assert of_all * TOKENS > 0.1
    assert ladder * (TOKENS - PROMPT + 1) > 1e-3  # its attention reads another stream, so keys and values are others


def test_a_rise_is_a_mean_over_windows() -> None:
    effects = [(0.2, 1 / 9, 2.0), (0.4, 3 / 9, 2.0)]
    given, own = rise_of(effects, 2.0), rise_of(effects, 2.0, own=True)
    assert given.rise == given.seen == own.seen == pytest.approx(2 / 18, abs=1e-7)
    assert own.kl == pytest.approx(0.3)
    assert own.rise == pytest.approx(0.15)
    assert own.error == pytest.approx(0.05)


def test_what_is_measured_is_kept(measured: Measurements, monkeypatch: pytest.MonkeyPatch) -> None:
    mix = searched.mix("int8@1", "drop@2")
    first = measured.rise(mix)
    monkeypatch.setattr("rewriter.predict.search.measured.Simulator", None)
    assert measured.rise(mix) == first


def test_the_model_writes_the_same_text_from_the_same_seed(program: Program) -> None:
    one, two, other = (text_for(program, None, (3, 1), seed) for seed in (3, 3, 4))
    assert one == two
    assert one.calibration != other.calibration
    assert [len(one.calibration), len(one.held_out)] == [3, 1]
    assert one.own
    rows = one.calibration + one.held_out
    assert {len(row) for row in rows} == {64}  # the model has no more positions
    assert len(set(map(tuple, rows))) == 4
    assert {row[0] for row in rows} == {1}  # the token that begins a text


def test_on_its_own_text_the_rise_is_expected_to_be_the_divergence(program: Program, measured: Measurements) -> None:
    """What makes a short text enough: both are means over what the model writes, the divergence with less noise."""
    text, mix = text_for(program, None, (24, 1), 0), searched.mix("drop@4")
    measured = Measurements(program, RANKS, measured.weights, text, Store(None, {}))
    own, given = measured.rise(mix), rise_of(measured.effects(mix, text.calibration), measured.rise().loss)
    assert own.rise * own.loss == pytest.approx(own.kl, rel=1e-4)
    assert own.error < given.error
    assert abs(own.seen - own.rise) < 4 * given.error

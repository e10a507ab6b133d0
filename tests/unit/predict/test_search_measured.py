"""What a search measures is the loss of what is converted: parts against whole models, on three ranks too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import searched
import torch

from rewriter.api import convert, load
from rewriter.convert.save_options import SaveOptions
from rewriter.ir import Program
from rewriter.ir.simulate import load_weights, simulate
from rewriter.passes.phases import single_device
from rewriter.passes.quantize_collectives import always_quantized, is_quantized
from rewriter.predict.search.choices import REWRITES, Mix, Part, recipe_of
from rewriter.predict.search.computed import Computed, WindowChange
from rewriter.predict.search.measurements import Measurements, Store, StreamedWeights
from rewriter.predict.search.texts import Text, text_for
from rewriter.recipes.apply import apply_recipe

RANKS = 3
IDS = torch.randint(131, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def measured(computed: Computed) -> Measurements:
    return Measurements(computed, Text(IDS, IDS, "random tokens"), Store(None, {}))


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    return logits.double().log_softmax(-1)


def expected(before: torch.Tensor, after: torch.Tensor, ids: torch.Tensor) -> tuple[float, float]:
    """(KL, rise in loss), sums over one window, written out."""
    old, new = log_probabilities(before), log_probabilities(after)
    divergence = (old.exp() * (old - new)).sum()
    loss = [-x[:-1].gather(-1, ids[1:, None]).sum() for x in (old, new)]
    return float(divergence), float(loss[1] - loss[0])


def converted(program: Program, mix: Mix, weights: Mapping[str, torch.Tensor], windows: torch.Tensor) -> torch.Tensor:
    """The logits [N, 24, V] of all ranks under the recipe, by the interpreter of whole programs.

    Window by window: where in a block of a quantized message a token stands depends on what it is sent with.
    """
    rewritten, _ = apply_recipe(program, recipe_of(mix), RANKS)
    whole = always_quantized(rewritten) if is_quantized(rewritten) else single_device(rewritten)
    return torch.cat([simulate(whole, ids[None], weights=weights) for ids in windows])


def same(found: WindowChange, wanted: tuple[float, float]) -> None:
    assert found.divergence == pytest.approx(wanted[0], rel=2e-3, abs=2e-4)
    assert found.rise == pytest.approx(wanted[1], rel=2e-3, abs=1e-3)


def every() -> list[Mix]:
    """Every rewrite of all tokens at the first layer, in the middle and at the end."""
    lasts = {name: searched.LAYERS - rewrite.layers for name, rewrite in REWRITES.items() if not rewrite.prompt}
    return [Mix((Part(n, name),)) for name, last in lasts.items() for n in sorted({0, 2, last}) if n <= last]


@pytest.mark.slow
def test_each_alone_is_what_the_converted_model_loses(program: Program, computed: Computed) -> None:
    weights = load_weights(program)
    before = simulate(program, IDS[:1], weights=weights)
    changes = computed.changes([computed.part(mix) for mix in every()], IDS[0])
    for mix, change in zip(every(), changes, strict=True):
        wanted = expected(before[0], converted(program, mix, weights, IDS[:1])[0], IDS[0])
        same(change, wanted)
        if not mix.parts[0].rewrite.format and mix != searched.mix("ladder@0"):
            assert wanted[0] > 1e-3, f"{mix.key} changes too little to be told from the original"


MIXES = [
    ("drop@0", "ladder@1", "ladder@2", "own-partial@3", "parallel@4", "int8@2"),
    ("parallel-own@0", "desync-4x@1", "drop-mlp@3", "int4-hadamard@0", "int8@5"),
    ("desync-8x@1", "own-partial@5"),
    ("own-partial@1", "own-partial@2", "drop@3", "drop-mlps@2")[:3],
]


@pytest.mark.parametrize("words", MIXES, ids=" ".join)
def test_a_mix_is_what_the_converted_model_loses(program: Program, computed: Computed, words: tuple[str, ...]) -> None:
    mix = searched.mix(*words)
    weights = load_weights(program)
    before, after = simulate(program, IDS, weights=weights), converted(program, mix, weights, IDS)
    for ids, old, new in zip(IDS, before, after, strict=True):
        same(*computed.changes([computed.part(mix)], ids), expected(old, new, ids))


@pytest.mark.parametrize(
    "words", [("ladder@2", "parallel@4"), ("drop@1", "own-partial@4"), ("desync-4x@2", "drop-mlp@0")], ids=" ".join
)
def test_a_mix_is_what_the_emitted_checkpoint_loses(
    directory: Path, program: Program, computed: Computed, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """The files that `rewrite` writes, loaded by transformers: bound ones compute all three ranks."""
    mix, out = searched.mix(*words), tmp_path / "out"
    convert(directory, recipe_of(mix), out=out, tp=RANKS, options=SaveOptions(verify="none"))
    with torch.no_grad():
        after = load(out, dtype=torch.float32).eval()(input_ids=IDS, use_cache=False).logits
    before = simulate(program, IDS)
    for ids, old, new in zip(IDS, before, after, strict=True):
        same(*computed.changes([computed.part(mix)], ids), expected(old, new, ids))


def test_weights_are_forgotten_when_others_need_their_place(program: Program) -> None:
    whole = load_weights(program)
    largest = max(t.nbytes for t in whole.values())
    streamed = StreamedWeights(program, limit=2 * largest)
    for name, tensor in whole.items():
        assert torch.equal(streamed[name], tensor)
        assert sum(kept.nbytes for kept in streamed.kept.tensors.values()) <= 2 * largest
    assert len(streamed.kept.tensors) < len(whole)
    mix = searched.mix("drop@3")
    few, all_kept = (Computed(program, RANKS, weights) for weights in (streamed, whole))
    assert few.changes([few.part(mix)], IDS[0]) == all_kept.changes([all_kept.part(mix)], IDS[0])


def test_what_is_measured_is_kept(measured: Measurements, monkeypatch: pytest.MonkeyPatch) -> None:
    mixes = [searched.mix("drop@2"), searched.mix("int8@1", "drop@2")]
    first = measured.rises(mixes), measured.loss()
    monkeypatch.setattr("rewriter.predict.search.computed.Simulator", None)
    assert (measured.rises(mixes), measured.loss()) == first


def test_the_model_writes_the_same_text_from_the_same_seed(program: Program) -> None:
    one, two, other = (text_for(program, None, (3, 1), seed) for seed in (3, 3, 4))
    assert torch.equal(one.calibration, two.calibration)
    assert torch.equal(one.held_out, two.held_out)
    assert not torch.equal(one.calibration, other.calibration)
    assert [len(one.calibration), len(one.held_out)] == [3, 1]
    assert one.own
    assert one.calibration.shape[1] == 64  # the model has no more positions
    rows = torch.cat([one.calibration, one.held_out])
    assert len({tuple(row.tolist()) for row in rows}) == 4
    assert bool((rows[:, 0] == 1).all())  # the token that begins a text


def test_on_its_own_text_the_rise_is_expected_to_be_the_divergence(program: Program, computed: Computed) -> None:
    """What makes a short text enough: both are means over what the model writes, the divergence with less noise."""
    text = text_for(program, None, (24, 1), 0)
    measured = Measurements(computed, text, Store(None, {}))
    (rise,) = measured.rises([searched.mix("drop@4")]).values()
    assert rise.rise == rise.kl
    assert rise.error < rise.seen_error
    assert abs(rise.seen - rise.kl) < 4 * rise.seen_error

"""What a search measures is the loss of what is converted: parts and tails against whole models, on three ranks too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import searched
import torch

from rewriter.api import convert, load
from rewriter.ir import Program
from rewriter.passes.base import single_device
from rewriter.passes.permute import order_of
from rewriter.passes.quantize_collectives import always_quantized, is_quantized
from rewriter.recipes.apply import apply_recipe
from rewriter.search.choices import FORMATS, REWRITES, Mix, Placement, mix_of, recipe_of
from rewriter.search.computed import Computed
from rewriter.search.losses import Change
from rewriter.search.measurements import Measurements
from rewriter.search.store import Store
from rewriter.search.streamed_weights import StreamedWeights
from rewriter.search.tails import Tails
from rewriter.search.texts import Text, text_for
from rewriter.tracing import trace
from rewriter.verify.simulate import load_weights, simulate

RANKS = 3
IDS = torch.randint(131, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return searched.save(tmp_path_factory.mktemp("searched"))


@pytest.fixture(scope="module")
def program(directory: Path) -> Program:
    return trace(directory)


@pytest.fixture(scope="module")
def tails(program: Program) -> Tails:
    return Tails(Computed(program, RANKS), StreamedWeights(program))


@pytest.fixture
def measured(tails: Tails) -> Measurements:
    return Measurements(tails, Text(IDS, IDS, IDS, "random tokens"), Store(None, {}))


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    return logits.double().log_softmax(-1)


def expected(before: torch.Tensor, after: torch.Tensor, ids: torch.Tensor) -> tuple[float, float]:
    """(KL, rise in loss), sums over one window, written out."""
    old, new = log_probabilities(before), log_probabilities(after)
    divergence = (old.exp() * (old - new)).sum()
    loss = [-x[:-1].gather(-1, ids[1:, None]).sum() for x in (old, new)]
    return float(divergence), float(loss[1] - loss[0])


def converted(program: Program, mix: Mix, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The logits [2, 24, V] of all ranks under the recipe, by the interpreter of whole programs.

    Window by window: where in a block of a quantized message a token stands depends on what it is sent with.
    """
    rewritten, _ = apply_recipe(program, recipe_of(mix), RANKS)
    whole = always_quantized(rewritten) if is_quantized(rewritten) else single_device(rewritten)
    return torch.cat([simulate(whole, ids[None], weights=weights) for ids in IDS])


def same(found: Change, wanted: tuple[float, float]) -> None:
    assert found.divergence == pytest.approx(wanted[0], rel=2e-3, abs=2e-4)
    assert found.rise == pytest.approx(wanted[1], rel=2e-3, abs=1e-3)


def every() -> list[Mix]:
    """Every rewrite at the first layer, in the middle and at the end."""
    found = []
    for rewrite in REWRITES:
        last = searched.LAYERS - rewrite.layers
        found += [mix_of([Placement(start, rewrite.name)]) for start in sorted({0, 2, last}) if start <= last]
    return found + [mix_of([], {layer: format}) for layer in (0, 5) for format in FORMATS]


def test_each_alone_is_what_the_converted_model_loses(program: Program, tails: Tails) -> None:
    weights = load_weights(program)
    before = simulate(program, IDS, weights=weights)
    found = tails.alone([(tails.computed.part(mix), tails.weights) for mix in every()], IDS[0])
    for mix, change in zip(every(), found, strict=True):
        wanted = expected(before[0], converted(program, mix, weights)[0], IDS[0])
        same(change, wanted)
        if mix.placements and mix != searched.mix("ladder@0"):
            assert wanted[0] > 1e-3, f"{mix.key} changes too little to be told from the original"


MIXES = [
    ("drop@0", "ladder@1", "ladder@2", "own-partial@3", "parallel@4", "int8@2"),
    ("parallel-own@0", "desync-4x@1", "drop-mlp@3", "int4-hadamard@0", "int8@5"),
    ("desync-8x@1", "own-partial@5"),
    ("own-partial@1", "own-partial@2", "drop@3", "drop-mlps@2")[:3],
]


@pytest.mark.parametrize("words", MIXES, ids=" ".join)
def test_a_mix_is_what_the_converted_model_loses(program: Program, tails: Tails, words: tuple[str, ...]) -> None:
    mix = searched.mix(*words)
    weights = load_weights(program)
    before, after = simulate(program, IDS, weights=weights), converted(program, mix, weights)
    found = tails.mixed(tails.computed.part(mix), tails.weights, IDS)
    for ids, change, old, new in zip(IDS, found, before, after, strict=True):
        same(change, expected(old, new, ids))


@pytest.mark.parametrize(
    "words",
    [("ladder@2", "parallel@4"), ("drop@1", "own-partial@4"), ("desync-4x@2", "drop-mlp@0"), ("drop@2+order",)],
    ids=" ".join,
)
def test_a_mix_is_what_the_emitted_checkpoint_loses(
    directory: Path, program: Program, measured: Measurements, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """The files that `rewrite` writes, loaded by transformers: bound ones compute all three ranks."""
    mix, orders = searched.mix(*(w for w in words if "+" not in w)), {}
    if not mix.placements:
        (mix,) = measured.orders([searched.mix("drop@2")], lambda *_: None)
        orders = measured.order_of(mix)
        assert orders
    out = tmp_path / "out"
    convert(directory, recipe_of(mix, orders), out=out, tp=RANKS, verify="none")
    with torch.no_grad():
        after = load(out, dtype=torch.float32).eval()(input_ids=IDS, use_cache=False).logits
    before = simulate(program, IDS)
    found = measured.tails.mixed(measured.part(mix), measured.weights(mix), IDS)
    for ids, change, old, new in zip(IDS, found, before, after, strict=True):
        same(change, expected(old, new, ids))


def test_quantized_keys_and_values_are_what_another_grid_loses(program: Program, measured: Measurements) -> None:
    mix = Mix(base="attention2d", keys="int8@16")
    recipe = recipe_of(mix).with_options(2, {"grid": [1, 1, RANKS]})
    rewritten, _ = apply_recipe(program, recipe, sp=RANKS, disable=["overlap"])
    weights = load_weights(program)
    wanted = 0.0
    for ids in IDS:
        before, after = (simulate(p, ids[None], weights=weights)[0] for p in (program, rewritten))
        wanted += expected(before, after, ids)[0] / IDS.numel()
    assert wanted > 1e-6
    assert measured.mixed(mix).kl == pytest.approx(wanted, rel=0.02)


def test_an_order_is_of_the_weights_and_of_no_other_block(measured: Measurements) -> None:
    (mix,) = measured.orders([searched.mix("drop@2")], lambda *_: None)
    (path, ranks), *more = measured.order_of(mix).items()
    assert (path, more) == ("model.layers.2.mlp", [])
    plain, moved = measured.tails.weights, measured.weights(mix)
    name = "model.layers.2.mlp.down_proj.weight"
    assert torch.equal(moved[name], plain[name][:, list(order_of(ranks))])
    assert moved["model.layers.3.mlp.down_proj.weight"] is plain["model.layers.3.mlp.down_proj.weight"]


def test_variants_that_do_not_fit_at_once_are_measured_in_groups(tails: Tails, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [(tails.computed.part(mix), tails.weights) for mix in every()]
    at_once = tails.alone(parts, IDS[0])
    monkeypatch.setattr("rewriter.search.tails._VARIANTS", 5 * 48 * 24 * 4)
    grouped = tails.alone(parts, IDS[0])
    for a, b in zip(at_once, grouped, strict=True):
        assert a.divergence == pytest.approx(b.divergence, rel=1e-4, abs=1e-5)


def test_weights_are_forgotten_when_others_need_their_place(program: Program) -> None:
    whole = load_weights(program)
    largest = max(t.nbytes for t in whole.values())
    streamed = StreamedWeights(program, limit=2 * largest)
    for name, tensor in whole.items():
        assert torch.equal(streamed[name], tensor)
        assert streamed._bytes <= 2 * largest
    assert len(streamed._kept) < len(whole)
    computed = Computed(program, RANKS)
    mix = searched.mix("drop@3")
    some = Tails(computed, streamed).alone([(computed.part(mix), streamed)], IDS[0])
    assert some == Tails(computed, whole).alone([(computed.part(mix), whole)], IDS[0])


def test_what_is_measured_is_kept(measured: Measurements, monkeypatch: pytest.MonkeyPatch) -> None:
    mixes = [searched.mix("drop@2"), searched.mix("int8@1")]
    first = measured.alone(mixes, 0, 16, lambda *_: None), measured.mixed(mixes[0])
    monkeypatch.setattr(measured.tails, "alone", None)
    monkeypatch.setattr(measured.tails, "mixed", None)
    assert (measured.alone(mixes, 0, 16, lambda *_: None), measured.mixed(mixes[0])) == first


def test_the_model_writes_the_same_text_from_the_same_seed(program: Program) -> None:
    one, two, other = (text_for(program, None, (1, 2, 1), seed) for seed in (3, 3, 4))
    assert one.digest == two.digest != other.digest
    assert [len(w) for w in (one.arranging, one.calibration, one.held_out)] == [1, 2, 1]
    assert one.own
    assert one.calibration.shape[1] == 64  # the model has no more positions
    rows = torch.cat([one.arranging, one.calibration, one.held_out])
    assert len({tuple(row.tolist()) for row in rows}) == 4
    assert bool((rows[:, 0] == 1).all())  # the token that begins a text


def test_on_its_own_text_the_rise_is_expected_to_be_the_divergence(program: Program, tails: Tails) -> None:
    """What makes a short text enough: both are means over what the model writes, the divergence with less noise."""
    text = text_for(program, None, (1, 24, 1), 0)
    measured = Measurements(tails, text, Store(None, {}))
    rise = measured.mixed(searched.mix("drop@4"))
    assert rise.rise == rise.kl
    assert rise.error < rise.seen_error
    assert abs(rise.seen - rise.kl) < 4 * rise.seen_error

"""Layers of the vLLM plugin where tokens of the prompt alone are rewired, on an engine of equal ranks."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_serving_layers import CASES, TOKENS, WIDTH, WIRINGS, EqualRanks, Paired, Scaled, blocks_of, reference, stream

from rewriter.ir.phases import PromptPhase
from rewriter.output.sum_schedule import schedule_of
from rewriter.runtime.serving.vllm import engine
from rewriter.runtime.serving.vllm.layer_form import form_of
from rewriter.runtime.serving.vllm.phased_layer import PhasedLayer
from rewriter.runtime.serving.vllm.phases import Rows, exact_from, phase_of, rows_of


@pytest.fixture(autouse=True)
def ranks():
    before = engine.engine
    engine.use(EqualRanks())
    engine.engine.rows = None
    yield engine.engine
    engine.use(before)


class Exit:
    def __init__(self, block):
        self.block = block

    def reduce(self, yes):
        self.block.reduce_results = yes


def phased(layer_class, config):
    """Layers as `rewire` makes them of vLLM's."""
    torch.manual_seed(0)
    layers = [layer_class() for _ in config.rewriter_delays]
    forms = [form_of(layer, blocks_of(layer), torch.float32) for layer in layers]
    schedule = schedule_of(config, (), all(form.mergeable for form in forms))
    made_class, previous = type("Rewired", (PhasedLayer, layer_class), {}), ()
    for layer, form, steps in zip(layers, forms, schedule.layers, strict=True):
        if not any(step.unreduced or step.late or step.factor != 1.0 for step in steps):
            previous = ()
            continue
        layer.exits = tuple(
            tuple(Exit(layer.get_submodule(path)) for path in branch.paths) if step.unreduced else ()
            for branch, step in zip(form.branches, steps, strict=True)
        )
        layer.__class__, layer.own_form, layer.steps = made_class, form, steps
        layer.form = form.with_factors([step.factor for step in steps])
        layer.previous, previous = previous, (layer,)
    return layers


def rows(*rewired):
    return Rows(torch.tensor(rewired), torch.tensor([row for row in range(TOKENS) if row not in rewired]))


@pytest.mark.parametrize("given", [rows(1, 2), rows(0), rows(0, 1, 2, 3, 4), rows(0, 4)], ids=str)
@pytest.mark.parametrize(("layer_class", "name"), CASES)
def test_every_token_is_computed_by_its_own_wiring(layer_class, name, given, ranks):
    config = WIRINGS[name]
    layers, x = phased(layer_class, config), torch.randn(TOKENS, WIDTH)
    expected = reference(layers, SimpleNamespace(rewriter_delays=[[0, 0]] * len(layers)), x)
    expected[given.rewired] = reference(layers, config, x)[given.rewired]
    ranks.rows = given
    torch.testing.assert_close(stream(layers, x), expected)


@pytest.mark.parametrize("layer_class", [case[0] for case in CASES[:1]] + [Scaled])
def test_without_rewired_tokens_the_own_forward_runs(layer_class, monkeypatch):
    layers, x = phased(layer_class, WIRINGS["desync, sum"]), torch.randn(TOKENS, WIDTH)
    monkeypatch.setattr(PhasedLayer, "call", lambda *_: pytest.fail("the layer was rewired"))
    plain = [layer_class() for _ in layers]
    for one, layer in zip(plain, layers, strict=True):
        one.load_state_dict(layer.state_dict())
    assert torch.equal(stream(layers, x), stream(plain, x))


def test_rows_follow_from_the_place_in_each_request():
    phase = PromptPhase(exact_tail=2, exact_head=1)
    # a chunk that begins a prompt of 8, one that ends a prompt of 6, a generated token, and two rows of padding
    found = rows_of(phase, np.array([8, 6, 4]), np.array([0, 3, 9]), np.array([4, 3, 1]), 10, "cpu")
    assert found.rewired.tolist() == [1, 2, 3, 4]
    assert found.exact.tolist() == [0, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("phase", [PromptPhase(3, 2), PromptPhase(1, 0), PromptPhase(4, 9)], ids=str)
def test_rows_of_any_chunks_are_those_of_the_whole_prompt(phase):
    for prompt in range(1, 14):
        whole = phase.rewired(prompt + 3, prompt=prompt)[0]
        for chunk in (1, 2, 5):
            found = []
            for begin in range(0, prompt + 3, chunk):
                count = min(chunk, prompt + 3 - begin)
                made = rows_of(phase, np.array([prompt]), np.array([begin]), np.array([count]), count, "cpu")
                found += [] if made is None else (made.rewired + begin).tolist()
            assert found == whole.nonzero()[:, 0].tolist()
            assert not whole[exact_from(phase, prompt) :].any()


def test_batches_of_generated_tokens_have_no_rewired_rows():
    assert rows_of(PromptPhase(), np.array([5, 9]), np.array([5, 12]), np.array([1, 1]), 8, "cpu") is None


def test_a_checkpoint_says_its_phase():
    said = SimpleNamespace(rewriter_phase={"exact_tail": 3, "exact_head": 2})
    assert phase_of(said) == PromptPhase(3, 2)
    assert phase_of(SimpleNamespace()) is None


@pytest.mark.parametrize("given", [rows(1, 2), rows(0, 1, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("layer_class", [Paired, Scaled])
@pytest.mark.parametrize("delays", [[[0, 0]] * 3, [[0, 1], [1, 1], [1, 1]]], ids=str)
def test_sums_of_rewired_tokens_alone_travel_quantized(delays, layer_class, given, ranks):
    sent = []
    ranks.quantized_sum_now = lambda x, format: (sent.append((format, len(x))), x.mul_(ranks.count))[1]
    wires = [{"format": "int8", "min_bytes": 4 * WIDTH * len(given.rewired), "layers": [0, 1]}]
    config = SimpleNamespace(rewriter_delays=delays)
    layers = phased(layer_class, SimpleNamespace(**vars(config), rewriter_quantized=wires))
    x = torch.randn(TOKENS, WIDTH)
    expected = reference(layers, SimpleNamespace(rewriter_delays=[[0, 0]] * 3), x)
    expected[given.rewired] = reference(layers, config, x)[given.rewired]
    ranks.rows = given
    torch.testing.assert_close(stream(layers, x), expected)
    assert sent == [("int8", len(given.rewired))] * 4
    ranks.rows = rows(3)  # a shorter message
    stream(layers, x)
    assert len(sent) == 4

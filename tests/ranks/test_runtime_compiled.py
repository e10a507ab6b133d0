"""Compiled segments: equal results, one compilation per class of layer, none per layer, token or prompt length."""

from __future__ import annotations

import pytest
import runtime_qwen
import runtime_reference as reference
import torch
from qwen_ranks import PROMPTS, build
from ranks import run_ranks
from torch._dynamo.utils import counters

from rewriter.runtime import Context, all_reduce, compile_segments, generate
from rewriter.runtime import compiled as segments
from rewriter.runtime.generation.decode_step import decode_step


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs():
    return counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_layers_of_a_class_share_their_graphs_and_tokens_add_none():
    plain, model = build(None, reference.weights()), build(None, reference.weights())
    names = compile_segments(model, backend="eager")
    assert names == [
        "LadderLayer.segment_0",
        "LadderLayer.segment_1",
        "StandardLayer.segment_0",
        "StandardLayer.segment_1",
    ]
    assert not counters["graph_break"]
    expected = generate(plain, PROMPTS, 2)
    assert generate(model, PROMPTS, 2) == expected
    # Prefill and decode, for each kind of layer and of mask, and the first ladder layer's prefill (nothing has
    # arrived).
    first = graphs()
    assert first <= 2 * (1 + 2) + 2 + 2 * 2
    assert generate(model, PROMPTS, 20) == generate(plain, PROMPTS, 20)
    assert graphs() == first, "a token, or a longer cache, was compiled on its own"
    longer = [[*prompt, 1, 2, 3, 4, 5, 6, 7] for prompt in PROMPTS]
    assert generate(model, longer, 6) == generate(plain, longer, 6)
    assert graphs() == first, "a longer prompt was compiled on its own"
    assert not counters["graph_break"]


def train_layer(group, compiled, backend):
    """One ladder layer's segments: output, and gradients of the input and of every parameter."""
    torch.manual_seed(7)
    layer = runtime_qwen.LadderLayer(group, 0)
    if compiled:
        compile_segments(layer, backend=backend)
    x = torch.randn(2, 9, reference.HIDDEN).requires_grad_()
    angles = torch.arange(9.0).expand(2, 9)[..., None] * torch.ones(reference.HEAD)
    h, partial = layer.segment_0(x, x * 0.5, angles.cos(), angles.sin(), Context())
    _, out = layer.segment_1(h, all_reduce(partial, group))
    out = all_reduce(out, group)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters())]


def train_both_ways(group, backend):
    eager, compiled = train_layer(group, False, backend), train_layer(group, True, backend)
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-4)
    return graphs(), dict(counters["graph_break"])


@pytest.mark.slow
def test_compiled_segments_train_on_real_ranks():
    # Inside are `copy_to_group` and shared KV heads: their backward passes hold collectives.
    for found in run_ranks(train_both_ways, 2, "aot_eager"):
        assert found == (2, {}), "one graph per segment, without breaks"


@pytest.mark.slow
def test_inductor_compiles_a_training_step():
    assert train_both_ways(None, "inductor") == (2, {})


@pytest.mark.slow
def test_the_step_of_one_rank_is_one_graph_for_every_prompt():
    plain, model = build(None, reference.weights()), build(None, reference.weights())
    compile_segments(model, backend="eager")
    assert generate(model, [PROMPTS[0]], 2) == generate(plain, [PROMPTS[0]], 2)
    step = decode_step(model, 1, 5, None)
    assert step.how == "compiled"
    before = graphs()
    for prompt, count in ((PROMPTS[1], 9), (PROMPTS[1] * 12, 40), (PROMPTS[1] * 40, 3)):  # more keys, a longer cache
        assert generate(model, [prompt], count) == generate(plain, [prompt], count)
    assert decode_step(model, 1, 300, None) is not step
    # prefill of more keys than a window has rings where it had none
    assert graphs() <= before + 2
    assert not counters["graph_break"]


@pytest.mark.slow
def test_a_step_that_is_no_one_graph_keeps_its_segments_and_says_why():
    plain, model = build(None, reference.weights()), build(None, reference.weights())
    compile_segments(model, backend="eager")
    model.register_forward_pre_hook(lambda module, args: torch._dynamo.graph_break())
    assert generate(model, PROMPTS, 5) == generate(plain, PROMPTS, 5)
    assert decode_step(model, len(PROMPTS), 9, None).how.startswith("compiled segments: ")


def test_products_of_one_row_become_reductions(monkeypatch):
    monkeypatch.setattr(segments, "product", lambda x, weight, bias=None: x.new_zeros(*x.shape[:-1], len(weight)))
    linear = torch.nn.Linear(3, 5)
    compiled = torch.compile(linear, backend=segments.with_reductions("eager"))
    with torch.no_grad():
        assert not compiled(torch.ones(1, 3)).any()
        assert torch.equal(compiled(torch.ones(2, 3)), linear(torch.ones(2, 3)))
    assert torch.equal(compiled(torch.ones(1, 3)), linear(torch.ones(1, 3))), "what learns keeps its gradients"


@pytest.mark.slow
def test_inductor_compiles_a_decode_step():
    plain, model = build(None, reference.weights()), build(None, reference.weights())
    compile_segments(model)
    for prompt in PROMPTS:
        assert generate(model, [prompt], 12) == generate(plain, [prompt], 12)
    assert decode_step(model, 1, 20, None).how == "compiled"

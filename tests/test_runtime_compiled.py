"""Compiled segments: equal results, one compilation per class of layer, none per layer, token or prompt length."""

from __future__ import annotations

import os

import pytest
import ranks as _ranks  # noqa: F401
import runtime_qwen
import runtime_reference as reference
import torch
from ranks import run_ranks
from test_runtime_parallel import PROMPTS, build, loss_of, relative
from torch._dynamo.utils import counters

from rewriter.runtime import Context, compile_segments, generate


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs():
    return counters["stats"]["unique_graphs"]


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
    # prefill and decode: segment_0 twice for the standard layer, and in the ladder once per kind of mask; segment_1 once per class
    first = graphs()
    assert first <= 2 * (2 + 1 + 1 + 1) + 2
    assert generate(model, PROMPTS, 20) == generate(plain, PROMPTS, 20)
    assert graphs() == first, "a token, or a longer cache, was compiled on its own"
    longer = [prompt + [1, 2, 3, 4, 5, 6, 7] for prompt in PROMPTS]
    assert generate(model, longer, 6) == generate(plain, longer, 6)
    assert graphs() == first, "a longer prompt was compiled on its own"

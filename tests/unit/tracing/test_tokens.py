"""A layer that flattens its tokens between blocks (OPT) has a residual stream all the same."""

from __future__ import annotations

import pytest
import torch
import zoo
from ladder_reference import ladder_reference
from oracles import relative_error
from programs import PASSES
from torch import fx
from transformers import AutoConfig, AutoModelForCausalLM

from rewriter.ir import Leaf
from rewriter.ir.simulate import simulate
from rewriter.tracing import trace
from rewriter.tracing.stream_wiring import keep_tokens

pytestmark = pytest.mark.tracer


@pytest.mark.parametrize("tp", [1, 2])
def test_opt_as_a_ladder_equals_its_reference(tp):
    config = AutoConfig.for_model(
        "opt", hidden_size=64, num_attention_heads=4, ffn_dim=96, num_hidden_layers=3, word_embed_proj_dim=64,
        vocab_size=256, max_position_embeddings=192,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    zoo.randomize(model, 0)
    ids, weights = zoo.batch(2, 21, 256), {n: p.detach() for n, p in model.named_parameters()}
    program = trace(config).with_(mesh={"tp": tp} if tp > 1 else {})
    ladder = PASSES["ladder"]().apply(PASSES["tensor_parallel"]().apply(program))
    with torch.no_grad():
        original = model(ids).logits
        with ladder_reference(model, range(3)):
            expected = model(ids).logits
        assert relative_error(expected, original) >= 1e-2
        assert relative_error(simulate(program, ids, weights=weights), original) <= 1e-5
        assert relative_error(simulate(ladder, ids, weights=weights), expected) <= 1e-4


def test_tokens_that_something_else_reads_flat_stay_flat():
    graph = fx.Graph()
    x = graph.placeholder("x")
    flat = graph.call_method("reshape", (x, -1, graph.call_method("size", (x, -1))))
    inner = graph.call_module("fc", (flat,))
    back = graph.call_method("view", (inner, graph.call_function(getattr, (x, "shape"))))
    graph.output((back, graph.call_method("cumsum", (inner, 0))))
    keep_tokens(graph, {"fc": Leaf("Linear", {}, {"weight": (4, 4)})})
    assert [n.target for n in graph.nodes if n.op == "call_method"] == ["size", "reshape", "view", "cumsum"]

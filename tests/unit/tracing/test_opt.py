"""A layer that flattens its tokens between blocks and calls dropout as a function (OPT) has a residual stream, and its
adapted checkpoint trains with its dropout."""

from __future__ import annotations

import functools

import pytest
import torch
import zoo
from ladder_reference import ladder_reference
from oracles import relative_error
from programs import PASSES, tensor_parallel
from torch import fx
from transformers import AutoConfig, AutoModelForCausalLM

from rewriter.emit.huggingface import emit_huggingface
from rewriter.emit.module import emit_runtime_module
from rewriter.ir import Leaf, Program
from rewriter.ir.simulate import simulate
from rewriter.tracing import trace
from rewriter.tracing.stream_wiring import keep_tokens

pytestmark = pytest.mark.tracer
CONFIG = AutoConfig.for_model(
    "opt", hidden_size=64, num_attention_heads=4, ffn_dim=96, num_hidden_layers=3, word_embed_proj_dim=64,
    vocab_size=256, max_position_embeddings=192, dropout=0.1, attention_dropout=0.0,
)  # fmt: skip


@functools.cache
def traced() -> Program:
    return trace(CONFIG)


@torch.no_grad()
def test_program_and_ladder_on_one_device_and_two_ranks_equal_the_model_and_its_reference():
    model = AutoModelForCausalLM.from_config(CONFIG, attn_implementation="eager").eval()
    zoo.randomize(model, 0)
    ids, weights = zoo.batch(2, 21, 256), {n: p.detach() for n, p in model.named_parameters()}
    original = model(ids).logits
    with ladder_reference(model, range(3)):
        expected = model(ids).logits
    assert relative_error(expected, original) >= 1e-2
    for ranks in (1, 2):
        sharded = tensor_parallel(traced(), ranks)
        assert relative_error(simulate(sharded, ids, weights=weights), original) <= 1e-5
        ladder = PASSES["ladder"]().apply(sharded)
        assert relative_error(simulate(ladder, ids, weights=weights), expected) <= 1e-4
    assert "3 MLP blocks" in sharded.history[-1].summary
    assert "dropout_probability = 0.1" in emit_runtime_module(sharded)


def test_the_adapted_checkpoint_drops_while_it_trains():
    text = str(emit_huggingface(PASSES["ladder"]().apply(traced())).modeling)
    assert text.count("torch.nn.functional.dropout(") == text.count("p=0.1, training=self.training)") > 0


def test_tokens_that_something_else_reads_flat_stay_flat():
    graph = fx.Graph()
    x = graph.placeholder("x")
    flat = graph.call_method("reshape", (x, -1, graph.call_method("size", (x, -1))))
    inner = graph.call_module("fc", (flat,))
    back = graph.call_method("view", (inner, graph.call_function(getattr, (x, "shape"))))
    graph.output((back, graph.call_method("cumsum", (inner, 0))))
    keep_tokens(graph, {"fc": Leaf("Linear", {}, {"weight": (4, 4)})})
    assert [n.target for n in graph.nodes if n.op == "call_method"] == ["size", "reshape", "view", "cumsum"]

"""A layer that calls dropout as a function (OPT) is traced, and its adapted checkpoint trains with it."""

from __future__ import annotations

import pytest
import torch
import zoo
from programs import PASSES, tensor_parallel
from transformers import AutoConfig, AutoModelForCausalLM

from rewriter.emit.huggingface import emit_huggingface
from rewriter.emit.module import emit_runtime_module
from rewriter.ir.simulate import simulate
from rewriter.tracing import trace


@pytest.fixture(scope="module")
def config():
    return AutoConfig.for_model(
        "opt",
        hidden_size=64,
        num_attention_heads=4,
        ffn_dim=96,
        num_hidden_layers=3,
        word_embed_proj_dim=64,
        vocab_size=256,
        max_position_embeddings=192,
        dropout=0.1,
        attention_dropout=0.0,
    )


def test_it_is_the_identity_in_evaluation_and_tensor_parallel(config):
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    zoo.randomize(model, 0)
    ids, weights = zoo.batch(2, 21, 256), {n: p.detach() for n, p in model.named_parameters()}
    program = trace(config)
    sharded = tensor_parallel(program, 2)
    with torch.no_grad():
        expected = model(ids).logits
        for each in (program, sharded):
            torch.testing.assert_close(simulate(each, ids, weights=weights), expected, rtol=1e-4, atol=1e-4)
    assert "3 MLP blocks" in sharded.history[-1].summary
    assert "dropout_probability = 0.1" in emit_runtime_module(sharded)


def test_the_adapted_checkpoint_drops_while_it_trains(config):
    text = str(emit_huggingface(PASSES["ladder"]().apply(trace(config))).modeling)
    assert text.count("torch.nn.functional.dropout(") == text.count("p=0.1, training=self.training)") > 0

"""Layers whose children add to the residual stream, and models that number their tokens themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import emitted
import pytest
import torch
from ladder_reference import ladder_reference
from oracles import relative_error
from programs import PASSES, tensor_parallel
from random_models import Models

from rewriter.emit.huggingface import emit_huggingface
from rewriter.ir.residual import residual_blocks
from rewriter.ir.simulate import simulate

_BERT: dict[str, Any] = dict(
    vocab_size=256, hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=4, is_decoder=True,
    max_position_embeddings=192, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=1,
)  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    # `self.ffn(normed, residual)` returns the sum.
    "mpt": {"model_type": "mpt", "vocab_size": 256, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 192},
    # So do `self.self_attention(normed, residual)`, which is more than sums, and `self.mlp`.
    "bloom": {"model_type": "bloom", "vocab_size": 256, "hidden_size": 64, "n_head": 4, "n_layer": 2},
    # Both blocks end in a child that is given the stream; its first token is at position 2.
    "roberta-prelayernorm": _BERT | {"model_type": "roberta-prelayernorm"},
}
_models = Models(CONFIGS)
model_of, traced, weights = _models.model, _models.traced, _models.weights


@pytest.mark.parametrize("length", [1, 21, 100])
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
@pytest.mark.fast("roberta-prelayernorm-1", "roberta-prelayernorm-21", "roberta-prelayernorm-100")
def test_the_add_inside_a_child_is_found(name: str, length: int) -> None:
    model, program = model_of(name), traced(name)
    ids = torch.randint(2, 256, (2, length), generator=torch.Generator().manual_seed(length))
    expected = model(input_ids=ids, use_cache=False).logits
    assert len(residual_blocks(program)) == 4
    assert relative_error(simulate(program, ids, weights=weights(name)), expected) <= 1e-5
    with ladder_reference(model, {1}):
        rewired = model(input_ids=ids, use_cache=False).logits
    assert relative_error(rewired, expected) >= 1e-2
    ladder = PASSES["ladder"]([1]).apply(program)
    assert relative_error(simulate(ladder, ids, weights=weights(name)), rewired) <= 1e-5
    sharded = tensor_parallel(ladder, 2)
    assert relative_error(simulate(sharded, ids, weights=weights(name)), rewired) <= 1e-4


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_an_emitted_layer_calls_what_the_child_called(name: str, tmp_path: Path) -> None:
    model, program = model_of(name), traced(name)
    model.save_pretrained(tmp_path / "source")
    files = emit_huggingface(PASSES["ladder"]([1]).apply(program))
    printed = {
        "mpt": "self.ffn.down_proj(",
        "bloom": "self.self_attention(input_layernorm, 0.0,",
        "roberta-prelayernorm": "self.output.dense(",
    }
    assert printed[name] in " ".join(str(files.modeling).split()).replace("( ", "(")
    emitted.write(files, tmp_path / "source", tmp_path / "out")
    loaded = emitted.load(tmp_path / "out", dtype=torch.float32)
    ids = torch.randint(2, 256, (2, 21), generator=torch.Generator().manual_seed(0))
    with ladder_reference(model, {1}):
        expected = model(input_ids=ids, use_cache=False).logits
    assert relative_error(loaded(input_ids=ids, use_cache=False).logits, expected) <= 1e-5

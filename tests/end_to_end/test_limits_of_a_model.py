"""Tokens and positions that the model has not: refused by number and size wherever they enter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from adapted import build_tokenizer
from refusals import Capture, refused
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

import rewriter as rw
from rewriter.adapt.self_written import self_written
from rewriter.api import convert
from rewriter.check.comparison import relative_error
from rewriter.check.coverage.configs import small_config
from rewriter.check.drift import calibration_tokens, windows
from rewriter.check.random_model import random_model
from rewriter.check.reference_modes import original_logits
from rewriter.common.errors import RewriterError
from rewriter.common.run_context import RunContext
from rewriter.convert.save_options import SaveOptions
from rewriter.ir.absolute_positions import position_table
from rewriter.ir.simulate import simulate
from rewriter.predict.search.measured import text_for
from rewriter.runtime.generation.generate import generate
from rewriter.runtime.loading import load

FEW = 100  # tokens, of the 259 that the tokenizer has
BEYOND = f"beyond the model's vocabulary of {FEW}"
POSITIONS = 24
LLAMA = AutoConfig.for_model(
    "llama", hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
    vocab_size=FEW, eos_token_id=2,
)  # fmt: skip
OPT = AutoConfig.for_model(
    "opt", hidden_size=32, word_embed_proj_dim=32, num_hidden_layers=3, num_attention_heads=4, ffn_dim=64,
    vocab_size=264, max_position_embeddings=POSITIONS, pad_token_id=1, bos_token_id=2, eos_token_id=2,
)  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REWRITER_DEBUG", raising=False)
    return tmp_path


def written(config: PreTrainedConfig, tp: int) -> None:
    """The model `m` of a config beside a tokenizer of bytes, and its rewritten form `out`."""
    AutoModelForCausalLM.from_config(config).save_pretrained("m")
    build_tokenizer(64).save_pretrained("m")
    convert("m", "ladder", out="out", tp=tp, options=SaveOptions(verify="none"))


def test_tokens_beyond_the_vocabulary(place: Path, capsys: Capture) -> None:
    written(LLAMA, tp=2)
    message = refused(capsys, "generate", "out", "--prompt", "xyz", "--max-new-tokens", "2")
    assert message.startswith("the prompt 'xyz': token 256 ('<|bos|>') is " + BEYOND)
    Path("data.jsonl").write_text(json.dumps({"text": "xyz"}) + "\n")
    message = refused(capsys, "adapt", "out", "--data", "data.jsonl", "--out", "healed")
    assert f"data.jsonl:1: token 256 ('<|bos|>') is {BEYOND}" in message
    program = rw.trace("m")
    for ask in (
        lambda: calibration_tokens(program, "xyz"),
        lambda: text_for(program, "xyz" * 99, (1, 1)),
        lambda: self_written(Path("m"), 8, torch.device("cpu"), RunContext()),
    ):
        with pytest.raises(RewriterError, match=BEYOND):
            ask()
    tokens, described = calibration_tokens(program)  # of the packaged text the rest is read, and said so
    assert int(tokens.max()) < FEW
    assert described.endswith(BEYOND)


def test_tokens_given_to_the_module(place: Path) -> None:
    written(LLAMA, tp=1)
    model = load("out")
    for ids in ([[1, FEW]], [[-1]]):
        with pytest.raises(RewriterError, match=BEYOND):
            model(torch.tensor(ids))
        with pytest.raises(RewriterError, match=BEYOND):
            generate(model, ids, 2)
    with pytest.raises(RewriterError, match=f"pad_token_id: token 100 is {BEYOND}"):
        generate(model, [[1], [1, 2]], 2, pad_token_id=FEW)
    assert len(generate(model, [[1, FEW - 1]], 2)[0]) == 2


@pytest.mark.parametrize(
    ("kind", "positions"),
    [
        *(("opt", 24), ("gptj", 24), ("ctrl", 24), ("llama", None), ("roberta", 23)),
        *(pytest.param(kind, 24, marks=pytest.mark.slow) for kind in ("gpt2", "biogpt", "xglm", "bart")),
    ],
)
def test_a_table_of_positions_is_known(kind: str, positions: int | None) -> None:
    """RoBERTa numbers tokens from the row after that of padding (here 0)."""
    sizes = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "max_position_embeddings": 24}
    other = {
        "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 2},
        "gptj": {"n_embd": 32, "n_layer": 1, "n_head": 2, "rotary_dim": 8},
        "ctrl": {"n_embd": 32, "n_layer": 1, "n_head": 2, "dff": 32},
        "xglm": {"d_model": 32, "num_layers": 1, "attention_heads": 2, "ffn_dim": 32},
        "bart": {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32},
        "roberta": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "is_decoder": True},
        "opt": {"hidden_size": 32, "word_embed_proj_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    }.get(kind, {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32})
    assert position_table(rw.trace(AutoConfig.for_model(kind, **sizes, **other))) == positions


@pytest.mark.parametrize("model_type", ["roberta-prelayernorm", "whisper"])
def test_no_text_is_read_that_is_longer_than_the_table(model_type: str) -> None:
    """Whisper's config names its positions `max_target_positions`."""
    program = rw.trace(small_config(model_type))
    rows = program.parameters[next(n for n in program.parameters if "position" in n)].shape[0]
    tokens = torch.randint(5, 250, (2 * rows,), generator=torch.Generator().manual_seed(0))
    model = random_model(small_config(model_type))
    longest = windows(program, tokens)[0][None]
    assert longest.shape[1] == rows - (2 if model_type.startswith("roberta") else 0)
    weights = {n: t.detach() for n, t in [*model.named_buffers(), *model.named_parameters()]}
    logits = simulate(program, longest, weights=weights)
    assert relative_error(logits, original_logits(model, longest)) < 1e-4
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        original_logits(model, tokens[None, : longest.shape[1] + 1])


def test_more_tokens_than_learned_positions(place: Path, capsys: Capture) -> None:
    written(OPT, tp=1)
    prompt = "twelve bytes"  # and a token before it
    message = refused(capsys, "generate", "out", "--prompt", prompt, "--max-new-tokens", "13")
    assert "13 tokens and 13 new ones need 25 positions, and the model has a table of 24. Ask for at most 12" in message
    assert "Give a shorter prompt" in refused(
        capsys, "generate", "out", "--prompt", 3 * prompt, "--max-new-tokens", "1"
    )
    ids = build_tokenizer(64)(prompt).input_ids
    model = load("out")
    with pytest.raises(RewriterError, match="Ask for at most 12 new tokens"):
        generate(model, [ids], 13)
    original = AutoModelForCausalLM.from_pretrained("out", trust_remote_code=True)
    expected = original.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert generate(model, [ids], 12) == expected[:, len(ids) :].tolist()

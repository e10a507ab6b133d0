"""Settings of the text model in a config of several models: read where transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from adapted import build_tokenizer
from quantized_checkpoints import fp8_blocks, quantize
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from rewriter import api
from rewriter.check.comparison import relative_error
from rewriter.check.coverage.configs import small_config
from rewriter.check.random_model import build_model
from rewriter.check.reference_modes import original_logits
from rewriter.common.text_settings import context_length, declared_dtype, stream_width, vocabulary_size
from rewriter.convert.rewritten_source import complete_config
from rewriter.emit.end_tokens import end_tokens, not_applied
from rewriter.output.manifest import read_manifest
from rewriter.weights.plain_model import plain_model

GEMMA = AutoConfig.for_model(
    "gemma3",
    text_config=dict(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=64, vocab_size=264, max_position_embeddings=128, sliding_window=16, eos_token_id=None,
        bos_token_id=None, pad_token_id=None,
    ),
    vision_config=dict(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    ),
    mm_tokens_per_image=4, image_token_index=263, boi_token_index=262, eoi_token_index=261,
)  # fmt: skip


def change(file: Path, **values: Any) -> None:
    data = json.loads(file.read_text())
    for place, value in values.items():
        table = data
        *outer, name = place.split("__")
        for part in outer:
            table = table[part]
        if value is None:
            table.pop(name, None)
        else:
            table[name] = value
    file.write_text(json.dumps(data))


def test_a_text_ends_where_its_text_model_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = AutoModelForCausalLM.from_config(GEMMA, dtype=torch.float32)
    zoo.randomize(model, seed=0)
    model.save_pretrained("m")
    build_tokenizer(64).save_pretrained("m")
    Path("m/generation_config.json").unlink(missing_ok=True)
    ids = torch.tensor([build_tokenizer(64)("def").input_ids])
    original = AutoModelForCausalLM.from_pretrained("m")
    free = original.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)[0, ids.shape[1] :].tolist()
    end = next(token for token in free if free.index(token) > 0)
    change(Path("m/config.json"), eos_token_id=None, text_config__eos_token_id=[end, 263])
    expected = AutoModelForCausalLM.from_pretrained("m").generate(ids, max_new_tokens=8, do_sample=False)
    expected = expected[0, ids.shape[1] :].tolist()
    assert expected == free[: free.index(end) + 1]
    api.convert("m", "tensor-parallel", out="out", options=api.SaveOptions(verify="none"))
    [found] = api.generate("out", ["def"], max_new_tokens=8)
    assert found.tokens == expected
    # configs leave out what their class has, the size of a vocabulary among it
    completed = complete_config({"text_config": {"hidden_size": 32}}, read_manifest(Path("out")))
    assert vocabulary_size(completed) == type(GEMMA.text_config)().vocab_size


@pytest.mark.parametrize(
    ("config", "own"),
    [
        ({"eos_token_id": 3, "text_config": {"eos_token_id": 5}}, None),
        ({"eos_token_id": None, "text_config": {"eos_token_id": 5, "pad_token_id": 4}}, None),
        ({"text_config": {"eos_token_id": [5, 6]}}, None),
        ({"decoder": {"eos_token_id": 5}, "text_config": {"eos_token_id": 6}}, None),
        ({"text_config": {}}, None),
        ({"text_config": {"eos_token_id": 5}}, {"eos_token_id": [7, 8], "pad_token_id": 2}),
        ({"eos_token_id": 5}, {"do_sample": False}),
    ],
)
def test_ends_are_those_of_transformers(tmp_path: Path, config: dict[str, Any], own: dict[str, Any] | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if own is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(own))
    name = "config.json" if own is None else "generation_config.json"
    theirs = GenerationConfig.from_pretrained(tmp_path, config_file_name=name, _from_model_config=own is None)
    ends, filling = end_tokens(tmp_path, config)
    said = theirs.eos_token_id
    assert ends == ([] if said is None else said if isinstance(said, list) else [said])
    assert filling == (theirs.pad_token_id if theirs.pad_token_id is not None else (ends or [0])[0])


def test_settings_that_are_only_in_the_text_model() -> None:
    inside = {"vocab_size": 99, "hidden_size": 12, "max_position_embeddings": 7, "dtype": "float16"}
    config = {"text_config": inside, "vision_config": {"hidden_size": 5}}
    assert (vocabulary_size(config), stream_width(config), context_length(config)) == (99, 12, 7)
    assert declared_dtype(config) == "float16"
    assert declared_dtype({"torch_dtype": "torch.bfloat16", **config}) == "bfloat16"


def test_padding_beyond_the_vocabulary_is_not_filled_with(tmp_path: Path) -> None:
    assert end_tokens(tmp_path, {"vocab_size": 10, "eos_token_id": 3, "pad_token_id": 10}) == ([3], 3)
    assert end_tokens(tmp_path, {"vocab_size": 10, "eos_token_id": 3, "pad_token_id": -1}) == ([3], 3)
    assert end_tokens(tmp_path, {"vocab_size": 10, "eos_token_id": [-1, 4], "pad_token_id": -1}) == ([-1, 4], 4)


def test_what_chooses_other_tokens_is_told(tmp_path: Path) -> None:
    assert not_applied(tmp_path) == []
    said = {"repetition_penalty": 1.3, "suppress_tokens": [5], "num_beams": 1, "min_length": None, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    assert not_applied(tmp_path) == ["repetition_penalty = 1.3", "suppress_tokens = [5]"]


def test_a_language_model_saved_without_the_model_around_it(tmp_path: Path) -> None:
    """Its config is the text part, whose type no auto class knows: `architectures` names the class."""
    config = small_config("emu3")
    model = build_model(config)
    zoo.randomize(model, seed=0)
    model.save_pretrained(tmp_path / "m")
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    out = tmp_path / "out"
    api.convert(tmp_path / "m", "tensor-parallel", tp=2, out=out, options=api.SaveOptions(verify="none"))
    ids = zoo.batch(2, 9, 250)
    for loaded in (api.load(out), plain_model(out)[0]):
        assert type(loaded) is type(model)
        assert relative_error(original_logits(loaded.eval(), ids), original_logits(model, ids)) < 1e-5
    assert 'Emu3ForCausalLM.from_pretrained("THIS DIRECTORY")' in (out / "README.md").read_text()


@pytest.mark.slow
def test_weights_that_the_text_model_says_are_quantized(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(GEMMA, dtype=torch.float32)
    model.save_pretrained(tmp_path / "m")
    pack, said = fp8_blocks(8, 8)
    quantize(tmp_path / "m", pack, said, "bfloat16")
    change(tmp_path / "m/config.json", quantization_config=None, text_config__quantization_config=said)
    plain_model(tmp_path / "m")
    api.convert(tmp_path / "m", "tensor-parallel", out=tmp_path / "out", options=api.SaveOptions(dequantize=True))
    assert "quantization_config" not in (tmp_path / "out/config.json").read_text()

"""A type that transformers has itself is transformers' own, whatever code its files name; another needs permission."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import Capture, refused
from transformers import AutoConfig, AutoModelForCausalLM

import rewriter as rw
from rewriter import api
from rewriter.adapt.models import load_model
from rewriter.cli import main

# As in the files of Phi-3: the modules are not there, or would run.
PHI3 = {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
TOKENIZER = {"AutoTokenizer": ["tokenization_phi3.Phi3Tokenizer", None]}


def change(model: Path, **values: Any) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(("recipe", "code"), [("ladder", "there"), ("tensor-parallel", "absent")])
def test_code_left_in_a_type_of_transformers(model: Path, recipe: str, code: str) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "phi3", hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, vocab_size=128, pad_token_id=0, eos_token_id=2, bos_token_id=1,
    )  # fmt: skip
    original = AutoModelForCausalLM.from_config(config).eval()
    original.save_pretrained(model)
    change(model, auto_map=PHI3 | TOKENIZER)
    if code == "there":
        for name in ("configuration_phi3", "modeling_phi3"):
            (model / f"{name}.py").write_text(f"open({str(model.parent / 'ran')!r}, 'w')\n")
    for words in (["inspect", "m"], ["m", "--recipe", recipe, "--tp", "2", "--out", "out", "--verify", "none"]):
        assert main(words) == 0
    assert rw.trace(model).source.module == "transformers.models.phi3.modeling_phi3"
    kept = json.loads(Path("out/config.json").read_text())["auto_map"]
    assert {name: kept[name] for name in TOKENIZER} == TOKENIZER
    assert not any(place in PHI3.values() for place in kept.values() if isinstance(place, str))
    loaded = AutoModelForCausalLM.from_pretrained("out", trust_remote_code=recipe == "ladder").eval()
    if recipe == "tensor-parallel":
        ids = torch.arange(12)[None]
        assert torch.equal(loaded(ids).logits, original(ids).logits)
    assert not (model.parent / "ran").exists()


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "phi3000", "auto_map": PHI3},
        {"model_type": "vit", "auto_map": PHI3},  # a type without a causal LM in transformers
    ],
    ids=["unknown", "no causal LM"],
)
def test_a_type_that_transformers_has_not_needs_permission(
    model: Path, capsys: Capture, config: dict[str, Any]
) -> None:
    change(model, **config)
    for words in (["inspect", "m"], ["m", "--recipe", "ladder", "--out", "out"], ["bisect", "m", "--recipe", "ladder"]):
        assert "brings its own Python code (auto_map)" in refused(capsys, *words)


@pytest.mark.slow
def test_an_attention_that_is_not_installed_here(model: Path) -> None:
    """As files name it that were trained with FlashAttention: transformers alone cannot load them without it."""
    change(model, _attn_implementation="flash_attention_2", attn_implementation="flash_attention_2")
    api.convert(model, "ladder", out="out", options=api.SaveOptions(verify="full"))
    rw.load("out")
    load_model(model, torch.device("cpu"))

"""Weights that the config ties and the checkpoint holds twice: one where they are equal, two where they are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from oracles import relative_error
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import rewriter as rw
from rewriter.ir import Program
from rewriter.runtime import Context, load

FAMILY = "llama_tied"


def source(directory: Path, *, different: bool) -> Path:
    """A tied model whose checkpoint has a head beside the embeddings: other weights, or the same."""
    zoo.save(FAMILY, directory)
    tensors = load_file(directory / "model.safetensors")
    embeddings = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embeddings.flip(0).contiguous() if different else embeddings.clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def logits_of(directory: Path) -> torch.Tensor:
    """As transformers computes them from the source, whatever its config says."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, trust_remote_code=True).eval()
    with torch.no_grad():
        result: torch.Tensor = model(zoo.batch(1, 9)).logits
    return result


def rank_logits(group: Any, directory: str) -> torch.Tensor:
    model = load(directory, device="cpu")
    with torch.no_grad():
        result: torch.Tensor = model(zoo.batch(1, 9), torch.arange(9)[None], Context())
    return result


def saved(program: Program, out: Path) -> Path:
    rw.save(program, out, options=rw.SaveOptions(verify="none"))
    return out


@pytest.mark.parametrize("recipe", ["tensor-parallel", "ladder"])
def test_different_weights_stay_two(recipe: str, tmp_path: Path) -> None:
    path = source(tmp_path / "source", different=True)
    program = rw.rewrite(rw.trace(path), recipe, tp=2)
    assert dict(program.ties) == {}
    out = saved(program, tmp_path / "out")
    assert json.loads((path / "config.json").read_text())["tie_word_embeddings"] is True
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    expected = logits_of(path if recipe == "tensor-parallel" else out)
    for found in run_ranks(rank_logits, 2, str(out)):
        assert relative_error(found, expected) <= 1e-5
    assert relative_error(logits_of(out), expected) <= 1e-6


def test_equal_weights_are_one(tmp_path: Path) -> None:
    path = source(tmp_path / "source", different=False)
    program = rw.rewrite(rw.trace(path), "tensor-parallel", tp=2)
    assert dict(program.ties) == {"lm_head.weight": "model.embed_tokens.weight"}
    out = saved(program, tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True
    for found in run_ranks(rank_logits, 2, str(out)):
        assert relative_error(found, logits_of(path)) <= 1e-5

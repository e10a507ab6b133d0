"""Rewritten checkpoints that can be trained on text: small families of the zoo with a byte-level tokenizer."""

from __future__ import annotations

import atexit
import functools
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from general_streams import HEALED, few_layers
from repository import ROOT
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rewriter.api import convert
from rewriter.check.random_model import build_model, randomize

sys.path.insert(0, str(ROOT / "examples"))
from tiny_corpus import BOS, EOS, PAD, VOCABULARY, build_tokenizer

from rewriter.convert.save_options import SaveOptions
from rewriter.recipes import Recipe

LENGTH = 48
PHASE = {"phase": "prompt", "exact_tail": 3, "exact_head": 2}
PHASED: dict[str, list[dict[str, Any]]] = {
    "prompt-ladder": [{"pass": "ladder", "layers": [2, 3], **PHASE}],
    "prompt-desync": [{"pass": "desync", "n": 2, "resync": "sum", **PHASE}],
}
"""Passes of recipes that rewire tokens of the prompt alone, whose ends are short."""
_TEXT = "def return if else for in import class self not None True False x y z = ( ) : +"
_WORDS = tuple(_TEXT.split())


@functools.cache
def root() -> Path:
    """A directory that is gone when the tests end."""
    path = Path(tempfile.mkdtemp(prefix="adapted-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def write_source(path: Path, family: str = "llama", layers: int = 4, hidden: int = 32) -> Path:
    """A small checkpoint, in bf16, whose blocks write as much as the stream holds."""
    torch.manual_seed(0)
    if family in HEALED:
        ends = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
        model = build_model(few_layers(family, vocab_size=VOCABULARY, **ends))
        randomize(model)
        return _save(model, path)
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2} if family == "mixtral" else {}
    config = AutoConfig.for_model(
        family, **sizes, **experts, intermediate_size=2 * hidden, vocab_size=VOCABULARY, max_position_embeddings=LENGTH,
        bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, tie_word_embeddings=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name:
                parameter.normal_(0, 0.3 / parameter.shape[-1] ** 0.5 * 3)
            elif "embed" in name:
                parameter.normal_(0, 0.3)
    return _save(model, path)


def _save(model: PreTrainedModel, path: Path) -> Path:
    model.to(torch.bfloat16).save_pretrained(path)
    build_tokenizer(LENGTH).save_pretrained(path)
    return path


def directory(recipe: str, tp: int = 1, family: str = "llama", hidden: int = 32) -> Path:
    """The family's checkpoint, rewritten; made once."""
    return _directory(recipe, tp, family, hidden)


@functools.cache
def _directory(recipe: str, tp: int, family: str, hidden: int) -> Path:
    name = family if hidden == 32 else f"{family}-{hidden}"
    source = root() / name
    if not source.exists():
        write_source(source, family, hidden=hidden)
    path = root() / f"{name}-{recipe}-tp{tp}"
    convert(source, recipe_of(recipe), out=path, tp=tp, options=SaveOptions(verify="none"))
    return path


def recipe_of(name: str) -> str | Recipe:
    if name not in PHASED:
        return name
    passes = [{"pass": "tensor_parallel"}, {"pass": "merge_reductions", "optional": True}, *PHASED[name]]
    return Recipe.model_validate({"name": name, "summary": "For short prompts.", "paper": "-", "passes": passes})


@functools.cache
def text_file(lines: int = 60, seed: int = 0) -> Path:
    """Training data: lines of text of uneven lengths."""
    draw = random.Random(seed)
    path = root() / f"text-{lines}-{seed}.jsonl"
    rows = [{"text": " ".join(draw.choices(_WORDS, k=draw.randint(3, 14)))} for _ in range(lines)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path

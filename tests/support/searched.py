"""A small model of six heads for searches, the result of one made by hand, and its parts."""

from __future__ import annotations

from pathlib import Path

import torch
import zoo
from transformers import AutoModelForCausalLM, LlamaConfig

from rewriter.predict.search.choices import STANDARD, Mix, Option, Part
from rewriter.predict.search.run import SearchPoint, SearchResult, Speed
from rewriter.recipes.recipe import MeasuredRecipe, MeasuredRise

LAYERS = 6


def save(directory: Path) -> Path:
    """A random Llama of six layers, with six heads and three key/value heads: it runs on three ranks."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=131, hidden_size=48, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=6,
        num_key_value_heads=3, max_position_embeddings=64, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    zoo.randomize(model, 0)
    model.save_pretrained(directory)
    return directory


def mix(*words: str, base: str = STANDARD) -> Mix:
    """`mix("drop@2", "int8@0")`."""
    named = (word.rpartition("@") for word in words)
    return Mix(tuple(Part(int(layer), name) for name, _, layer in named), base)


def point(of: Mix, speedup: float, rise: float, held_out: float | None = None) -> SearchPoint:
    rises = (
        None if r is None else MeasuredRise(loss=2.0, rise=r, error=0.1 * r, kl=2 * r, seen=r) for r in (rise, held_out)
    )
    return SearchPoint(of, Speed(0.5 / speedup, 0.02 / speedup, 1e-3 / speedup), speedup, *rises)


def result() -> SearchResult:
    """A search of which the figures are made up."""
    chosen = point(mix("drop@3", "drop-mlp@4", "int8@0"), 1.2, 0.008, 0.0088)
    points = (
        point(mix("ladder@2", "ladder@3", "parallel@5"), 1.4, 0.3),
        chosen,
        point(mix("drop@2", "drop@3"), 1.1, 0.02),
        point(mix("int8@0", "int8@1"), 1.02, 0.0002),
        point(Mix(), 1.0, 0.0),
    )
    measured = MeasuredRecipe(
        model="tiny", fabric="pcie-gen4", tp=3, workload="batch 1, 1024 + 512 tokens", speedup=1.2, budget=0.01,
        seconds_per_token=8e-4, text="text that the model wrote itself", loss=2.0, calibration=chosen.calibration,
        held_out=chosen.held_out,
    )  # fmt: skip
    return SearchResult(
        measured, "8 x A100 over PCIe", True, Speed(0.5, 0.02, 1e-3), chosen, points,
        (Option(Part(3, "drop"), 0.004, 0.005), Option(Part(0, "int8"), 1e-5, 0.0)), {"desync-8x": "<why>"},
    )  # fmt: skip

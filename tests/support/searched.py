"""A small model of six heads for searches, the result of one made by hand, and its parts."""

from __future__ import annotations

from pathlib import Path

import torch
import zoo
from transformers import AutoModelForCausalLM, LlamaConfig

from rewriter.predict.search.choices import STANDARD, Mix, Part
from rewriter.predict.search.gains import Speed
from rewriter.predict.search.greedy import Option
from rewriter.predict.search.result import Rise, SearchPoint, SearchResult, with_front

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


def rise(relative: float, loss: float = 2.0) -> Rise:
    return Rise(loss, relative * loss, 0.1 * relative * loss, relative * loss, relative * loss, 0.2 * relative * loss)


def result() -> SearchResult:
    """A search of which the figures are made up."""
    standard = Speed(0.5, 0.02, 1e-3)
    made = [
        (Mix(), 1.0, 0.0),
        (mix("int8@0", "int8@1"), 1.02, 0.0002),
        (mix("drop@3", "drop-mlp@4", "int8@0"), 1.2, 0.008),
        (mix("drop@2", "drop@3"), 1.1, 0.02),
        (mix("ladder@2", "ladder@3", "parallel@5"), 1.4, 0.3),
    ]
    points = with_front(
        SearchPoint(
            m,
            Speed(0.5 / s, 0.02 / s, 1e-3 / s),
            rise(r),
            s,
            held_out=rise(1.1 * r) if s == 1.2 else None,
        )
        for m, s, r in made
    )
    chosen = next(p for p in points if p.held_out is not None)
    return SearchResult(
        model="models/tiny", fabric="pcie-gen4", fabric_summary="8 x A100 over PCIe", modelled=True,
        workload={"batch": 1, "prompt": 1024, "generate": 512}, budget=0.01, text="text that the model wrote itself",
        loss=2.0, standard=standard, chosen=chosen, points=tuple(points),
        singles=(Option(Part(3, "drop"), 0.004, 0.005), Option(Part(0, "int8"), 1e-5, None)),
        ranks={"tp": 3, "sp": 1}, not_applied={"desync-8x": "<why>"},
    )  # fmt: skip

"""Keys and values that are kept while a model generates: counted in a program, and in transformers' cache."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import programs
import pytest
import torch
import zoo

from rewriter.adapt.self_written import STREAMS, parts_at_once
from rewriter.check.coverage.configs import small_config
from rewriter.check.random_model import build_model, random_ids
from rewriter.common.cache_names import cache_of
from rewriter.emit.module.keys import keys_alone
from rewriter.passes.placement.rank_memory import cache_elements
from rewriter.recipes import Recipe
from rewriter.recipes.apply import apply_recipe
from rewriter.tracing import trace

TOKENS = 8  # fewer than any window


@pytest.mark.parametrize("family", ["gemma2", "gpt2"])
@torch.no_grad()
def test_a_program_keeps_as_much_as_the_model_does(family: str) -> None:
    cache = cache_of(zoo.shared(family)(zoo.batch(2, TOKENS), use_cache=True))
    held = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert held > 0
    assert 2 * cache_elements(programs.traced(family), TOKENS) == held


@torch.no_grad()
def test_keys_that_layers_share_are_kept_once() -> None:
    """As transformers keeps them; a method that stores keys alone calls no layer that reads another one's."""
    config = small_config("gemma4_text")
    model, program = build_model(config), trace(config)
    cache = cache_of(model(random_ids(config, TOKENS), use_cache=True))
    held = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers if layer.keys is not None)
    assert 2 * cache_elements(program, TOKENS) == held
    storing = config.num_hidden_layers - config.num_kv_shared_layers
    assert 0 < storing < config.num_hidden_layers
    called = {str(node.target) for node in keys_alone(program)[0].graph.nodes if node.op == "call_module"}
    layers = [i for i in range(config.num_hidden_layers) if any(f"layers.{i}.self_attn" in path for path in called)]
    assert layers == list(range(storing))


def test_windows_keep_no_more_than_their_size() -> None:
    program, window = programs.traced("gemma2"), zoo.config("gemma2").sliding_window
    each = cache_elements(program, 1) // 6  # layers, every second with a window
    assert cache_elements(program, 100) == each * 3 * (100 + window)


def test_ranks_keep_their_own_heads_and_tokens() -> None:
    program = programs.traced("llama")
    ranks = apply_recipe(program, Recipe.load("long-context"), tp=2, sp=2)[0]
    assert cache_elements(ranks, 100) * 4 == cache_elements(program, 100)


def test_as_much_text_is_written_together_as_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo.save("llama", tmp_path)
    config = zoo.config("llama")
    stream = 4 * config.num_hidden_layers * 2 * config.num_key_value_heads * 8 * 100  # fp32, heads of 8, 100 tokens
    parameter = SimpleNamespace(device=torch.device("cuda"), element_size=lambda: 4)
    model: Any = SimpleNamespace(parameters=lambda: iter([parameter]))
    for parts, free in ((3, 3.5), (1, 0.1), (32, 1000)):
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda _, free=free: (int(4 * free * STREAMS * stream), 0))
        assert parts_at_once(tmp_path, model, 100) == parts

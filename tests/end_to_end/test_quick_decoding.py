"""Decoding of many streams: with a cache that does not move it predicts the same; in bf16 nearly the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from repository import TINY_LLAMA
from torch import nn
from transformers import AutoModelForCausalLM

from rewriter.adapt import self_written
from rewriter.adapt.self_written import RoomyLayer, with_bf16_products, with_room
from rewriter.common.cache_names import cache_argument, cache_of

LENGTH = 9


def decoded(model: Any, roomy: bool) -> torch.Tensor:
    """Logits of every token of three streams, one token at a time."""
    ids = torch.randint(0, 100, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    cache, found = None, []
    with torch.no_grad():
        for at in range(LENGTH):
            output = model(input_ids=ids[:, at : at + 1], use_cache=True, **{cache_argument(model): cache})
            cache = cache_of(output)
            if roomy and not at:
                cache = with_room(cache, LENGTH)
            found.append(output.logits[:, -1])
    if roomy:
        assert any(isinstance(layer, RoomyLayer) for layer in cache.layers)
        kept = [layer for layer in cache.layers if isinstance(layer, RoomyLayer)]
        assert {layer.keys.data_ptr() for layer in kept} == {layer._room[0].data_ptr() for layer in kept}
    return torch.stack(found)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_a_cache_with_room_gives_the_same(family: str) -> None:
    model = zoo.build(family).eval()
    torch.testing.assert_close(decoded(model, roomy=True), decoded(model, roomy=False))


def test_products_in_bf16_are_nearly_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_written, "multiplies_bf16", lambda device: True)
    monkeypatch.setattr(self_written, "WIDE_ENOUGH", 1)
    exact = decoded(AutoModelForCausalLM.from_pretrained(TINY_LLAMA, dtype=torch.float32).eval(), roomy=False)
    model = with_bf16_products(AutoModelForCausalLM.from_pretrained(TINY_LLAMA, dtype=torch.float32).eval())
    assert {layer.weight.dtype for layer in model.modules() if type(layer) is nn.Linear} == {torch.bfloat16}
    assert model.get_input_embeddings().weight.dtype == torch.float32
    found = decoded(model, roomy=True)
    assert found.dtype == torch.float32
    kl = nn.functional.kl_div(found.log_softmax(-1), exact.log_softmax(-1), reduction="batchmean", log_target=True)
    assert 0 < float(kl) / LENGTH < 1e-2


def test_narrow_products_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their casts take longer than their products."""
    monkeypatch.setattr(self_written, "multiplies_bf16", lambda device: True)
    model = with_bf16_products(zoo.build("llama"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}

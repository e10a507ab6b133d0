"""A cache is handed on under the name that the installed transformers has for it, without a warning."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import zoo

from rewriter.common.cache_names import cache_argument, cache_of


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mixtral"])
@torch.no_grad()
def test_a_cache_goes_in_and_comes_out(family: str) -> None:
    model, ids = zoo.shared(family), zoo.batch(2, 9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = cache_of(model(input_ids=ids[:, :8], use_cache=True))
        step = model(input_ids=ids[:, 8:], use_cache=True, **{cache_argument(model): cache})
        whole = model(input_ids=ids, use_cache=False)
    assert cache.get_seq_length() == 9
    torch.testing.assert_close(step.logits[:, -1], whole.logits[:, -1])


@pytest.mark.parametrize("name", ["cache", "past_key_values", "cache_params"])
def test_every_name_is_known(name: str) -> None:
    model: Any = type("Model", (), {})
    scope: dict[str, Any] = {}
    exec(f"def forward(self, input_ids, {name}=None): pass", scope)
    model.forward = scope["forward"]
    assert cache_argument(model()) == name
    assert cache_of({"logits": 0, name: 1}) == 1
    with pytest.raises(KeyError):
        cache_of({"logits": 0})

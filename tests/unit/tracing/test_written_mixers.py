"""Mixers that a model computes by a loop of its own: which are known, and that others are not taken for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hybrids
import pytest
from torch import Tensor, nn

from rewriter.tracing.mixer_functions import loop_over_tokens
from rewriter.tracing.written_mixers import computes_lightning_attention

PATH = "model.layers.1.self_attn"
MODEL = hybrids.model("minimax")
LIGHTNING: Any = type(MODEL.get_submodule(PATH))


def test_lightning_attention_is_known_by_what_it_computes() -> None:
    before = {name: value.clone() for name, value in MODEL.state_dict().items()}
    assert {p for p, m in MODEL.named_modules() if computes_lightning_attention(m)} == {
        p for p, m in MODEL.named_modules() if type(m) is LIGHTNING
    }
    assert all(value.equal(before[name]) for name, value in MODEL.state_dict().items())  # comparing changes nothing
    assert loop_over_tokens(MODEL) == f"{PATH} (forward)"


def other_result(self: nn.Module, *args: Any) -> Any:
    out, state = LIGHTNING.forward(self, *args)
    return 1.01 * out, state


def other_decay(self: Any, slope_rate: Tensor) -> tuple[Tensor, ...]:
    query, key, diagonal = LIGHTNING.decay_factors(self, slope_rate)
    return query, key.square(), diagonal  # counts from the second block on


@pytest.mark.parametrize(("name", "changed"), [("forward", other_result), ("decay_factors", other_decay)])
def test_what_computes_something_else_stays_the_source_s_own(name: str, changed: Callable[..., Any]) -> None:
    module = MODEL.get_submodule(PATH)
    try:
        module.__class__ = type("Other", (LIGHTNING,), {name: changed})
        assert not computes_lightning_attention(module)
    finally:
        module.__class__ = LIGHTNING

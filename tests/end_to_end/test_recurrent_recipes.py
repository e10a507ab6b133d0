"""Rewrites of the residual stream around recurrent mixers: what a conversion writes equals its reference, or a sentence
says why not."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import hybrids
import pytest
from transformers import PreTrainedModel

from rewriter.api import convert
from rewriter.check.coverage.configs import small_config
from rewriter.check.random_model import build_model, randomize, save_model
from rewriter.common.errors import RewriterError

RECIPES = ("ladder", "desync-2x", "ladder-own-partial", "ladder-int8", "tensor-parallel-int8")
INSIDE = "reduces over the ranks inside"
APART = "its 2 ranks cannot run on one device"
SCALED = "neither linear nor a norm"
STREAM = "no residual stream"  # outputs of layers are normed
REFUSED = {
    ("desync-2x", INSIDE): ("zamba", "zamba2", "mamba", "falcon_mamba"),
    ("desync-2x", APART): ("jamba",),
    ("desync-2x", SCALED): ("zaya",),
    ("ladder-own-partial", SCALED): ("zaya",),
    ("ladder-own-partial", INSIDE): (
        "bamba", "zamba", "zamba2", "olmo_hybrid", "mamba", "granitemoehybrid", "falcon_mamba", "jamba",
    ),
    ("ladder-own-partial", APART): ("bailing_hybrid", "kimi_linear", "falcon_h1"),
    **{(recipe, STREAM): ("minimax",) for recipe in RECIPES[:4]},
}  # fmt: skip
"""By recipe and reason, the types."""


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", [*hybrids.TYPES, *hybrids.OTHERS])
@pytest.mark.fast("mamba2-desync-2x")
def test_a_conversion_equals_its_reference(name: str, recipe: str, tmp_path: Path) -> None:
    reason = next((why for (asked, why), names in REFUSED.items() if asked == recipe and name in names), None)
    with pytest.raises(RewriterError, match=reason) if reason else nullcontext():
        check(hybrids.model(name), recipe, tmp_path)


def check(model: PreTrainedModel, recipe: str, tmp_path: Path) -> None:
    save_model(model, model.config, tmp_path / "source")
    convert(tmp_path / "source", recipe, out=tmp_path / "out", tp=2)
    checks = json.loads((tmp_path / "out" / "rewrite.json").read_text())["verification"]["checks"]
    assert "rewritten = " in str([check["name"] for check in checks])
    assert all(check["error"] <= check["limit"] for check in checks)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensor-parallel", "ladder"])
def test_adapters_of_layers_that_share_their_weights(recipe: str, tmp_path: Path) -> None:
    """Zamba 2's adapters of queries, keys and values are items of lists, which are fused."""
    changes = {"use_shared_attention_adapter": True, "tie_word_embeddings": False}
    model = build_model(small_config("zamba2", changes))
    randomize(model)
    assert any("linear_q_adapter_list" in name for name, _ in model.named_parameters())
    check(model, recipe, tmp_path)

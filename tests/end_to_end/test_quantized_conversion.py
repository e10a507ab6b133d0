"""Conversions whose reductions travel quantized: inspection, refusal, and what an output then says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zoo
from safetensors.torch import load_file

from rewriter.check.comparison import Verification
from rewriter.check.saved_output import verify
from rewriter.common.errors import RewriterError, VerificationError
from rewriter.convert.conversion import convert
from rewriter.convert.save_options import SaveOptions
from rewriter.explain.inspection import inspect
from rewriter.output.manifest import GOLDEN, read_manifest
from rewriter.recipes import Recipe
from rewriter.recipes.apply import check_bound

RANKS = 2


# --- conversion -------------------------------------------------------------------------------------------------------


def test_inspect_tells_what_is_quantized_and_from_when_on() -> None:
    found = inspect(zoo.config("llama"), "tensor-parallel-int4", RANKS)
    before, after = found.data["communication"]["before"], found.data["communication"]["after"]
    assert before["quantized"] is None
    assert after["quantized"] == {
        "format": "int4-hadamard",
        "min_bytes": 1 << 20,
        "from_tokens": (1 << 20) // (4 * zoo.HIDDEN),
        "reductions": 8,
        "bytes_per_token": 8 * 33,
        "exact_bytes_per_token": 8 * 256,
    }
    assert before["total"]["bytes_per_token"] - after["total"]["bytes_per_token"] == 8 * (256 - 33)
    assert {rule["rule"] for rule in found.data["rules"]} == {"merge_reductions", "overlap"}


def test_one_rank_is_refused_before_any_work() -> None:
    recipe = Recipe.load("ladder-int8")
    with pytest.raises(RewriterError, match=r"quantize_collectives: one rank sends nothing\. Give --tp 2"):
        check_bound(recipe, recipe.build(), 1)
    check_bound(recipe, recipe.build(), 2)


@pytest.mark.slow
def test_a_conversion_measures_the_ranks_and_leaves_the_checkpoint_exact(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    zoo.save("llama", source)
    options = {"quantize_collectives.min_bytes": 0}  # so that the 16 golden tokens are quantized too
    convert(source, "tensor-parallel-int8", out=out, tp=2, set=options, options=SaveOptions(verify="full"))
    manifest = read_manifest(out)
    quantized_checks = [c for c in manifest.verification.checks if "quantized" in c.name]
    assert [c.name.partition(":")[0] for c in quantized_checks if "real" in c.name] == ["real weights"]
    assert len(quantized_checks) == 2
    assert manifest.adapted.modeling is None
    assert manifest.quantized is not None
    assert (manifest.quantized.min_bytes, manifest.quantized.bytes_per_token) == (0, 8 * 65)
    assert manifest.verification.drift is not None
    assert manifest.verification.drift.kl > 0
    assert "sharded_logits" in load_file(out / GOLDEN)
    card = " ".join((out / "README.md").read_text().split())
    assert "8 all-reduces of a forward pass travel as `int8`" in card
    assert "Damaged" not in card  # the checkpoint computes the original's function
    assert "520 bytes per token with scales instead of 2,048 (25%)" in card
    assert any("sharded module" in name and value <= 0.5 for name, value in verify(out).items() if name != "note")


# --- the figure by which quantized logits are compared ---------------------------------------------------------------


def test_quantized_logits_may_jump_at_few_tokens_only() -> None:
    torch.manual_seed(0)
    plain = torch.randn(2, 20, 50)
    expected = plain + 0.01 * torch.randn_like(plain)
    jumped = expected.clone()
    jumped[:, :5] += 0.01 * torch.randn(2, 5, 50)
    Verification().require_quantized("x", [jumped], [expected], [plain], 0.5)
    for wrong in (plain, expected + 0.01 * torch.randn_like(plain), expected[:1]):
        with pytest.raises(VerificationError, match="at half of the tokens"):
            Verification().require_quantized("x", [wrong], [expected], [plain], 0.5)

"""Rotary scaling that depends on the length of a call (longrope, dynamic NTK): as transformers computes it."""

from __future__ import annotations

import copy
import functools
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rewriter import api
from rewriter.common.errors import RewriterError
from rewriter.emit.huggingface import emit_huggingface
from rewriter.ir import Program
from rewriter.ir.simulate import load_weights, simulate
from rewriter.passes.ladder import Ladder
from rewriter.runtime.generation.generate import generate
from rewriter.tracing import trace

PRETRAINED = 16  # tokens: the short factors are for as many
_SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "num_key_value_heads": 2,
    "intermediate_size": 112,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def _long(frequencies: int, **more: Any) -> dict[str, Any]:
    short, long = ([a + b * i for i in range(frequencies)] for a, b in ((1.0, 0.1), (2.0, 0.7)))
    return {"short_factor": short, "long_factor": long, "rope_type": "longrope", **more}


_DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
_PHI = {"max_position_embeddings": 256, "original_max_position_embeddings": PRETRAINED}
CASES: dict[str, dict[str, Any]] = {
    "phi3": {"model_type": "phi3", "rope_parameters": _long(8), **_PHI},
    "phi4_mini": {"model_type": "phi3", "partial_rotary_factor": 0.75, "rope_parameters": _long(6), **_PHI},
    "phimoe": {
        "model_type": "phimoe", "num_local_experts": 4, "num_experts_per_tok": 2, **_PHI,
        "rope_parameters": _long(8, short_mscale=1.1, long_mscale=1.4, original_max_position_embeddings=PRETRAINED),
    },
    "llama": {
        "model_type": "llama", "max_position_embeddings": 256,
        "rope_parameters": _long(8, rope_theta=10000.0, original_max_position_embeddings=PRETRAINED),
    },
    "dynamic": {"model_type": "llama", "max_position_embeddings": PRETRAINED, "rope_parameters": _DYNAMIC},
    "dynamic_in_some_layers": {
        "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 9, "max_position_embeddings": PRETRAINED,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": {"rope_type": "default"}, "full_attention": _DYNAMIC},
    },
}  # fmt: skip


@functools.cache
def model(name: str) -> PreTrainedModel:
    config = AutoConfig.for_model(**_SIZES, **json.loads(json.dumps(CASES[name])))
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    zoo.randomize(made, seed=0)
    return made


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def saved(name: str) -> Path:
        place = tmp_path_factory.mktemp(name) / "m"
        model(name).save_pretrained(place)
        return place

    return saved


def logits(made: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return made(input_ids=ids, use_cache=False).logits


def cases(*slow: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow if name in slow else ()) for name in CASES]


@pytest.mark.parametrize("name", cases("phi4_mini", "dynamic_in_some_layers"))
@pytest.mark.fast("llama", "phi3")
def test_programs_compute_both_sides_of_the_boundary(name: str, sources: Any) -> None:
    program: Program = trace(sources(name))
    for length in (5, PRETRAINED, PRETRAINED + 1, 40):
        ids = torch.randint(2, 250, (2, length), generator=torch.Generator().manual_seed(length))
        torch.testing.assert_close(simulate(program, ids), logits(model(name), ids), rtol=1e-5, atol=1e-5)
    one = torch.arange(3, 43)[None]
    assert not torch.allclose(logits(model(name), one)[:, :9], logits(model(name), one[:, :9]), atol=1e-2)


def greedy(made: PreTrainedModel, prompts: list[list[int]], new: int, use_cache: bool = True) -> list[list[int]]:
    """By transformers' own generation, padded at the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    with torch.no_grad():
        found = made.generate(
            input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=new, use_cache=use_cache
        )
    return found[:, longest:].tolist()


@pytest.mark.parametrize("name", cases("phi4_mini", "phimoe", "llama", "dynamic_in_some_layers"))
def test_generation_crosses_the_boundary_as_transformers_does(name: str, sources: Any, tmp_path: Path) -> None:
    from rewriter.runtime import load

    out = tmp_path / "out"
    api.convert(sources(name), "tensor-parallel", out=out, options=api.SaveOptions(verify="none"))
    made = load(out)
    for prompts in ([[7, 9, 11, 200]], [[5] * 4 + [77], list(range(30, 42))], [list(range(3, 3 + PRETRAINED))]):
        original = api.load(out, attn_implementation="eager")  # anew: dynamic scaling remembers the longest call
        renews = name.startswith("phi")
        expected = greedy(original, prompts, 20, use_cache=not renews)
        if renews and "next_sequence_length" in inspect.getsource(original.prepare_inputs_for_generation):
            # transformers 5.17 forgets all but the last token where it should compute all anew
            assert greedy(original, prompts, 20) == expected
        assert generate(made, prompts, 20, prefill_chunk=5) == expected
        assert len({*expected[0]}) > 2
    assert made.renewed_after == (PRETRAINED if name.startswith("phi") else None)
    if name == "phi3":  # what was cached before the boundary is wrong beyond it
        made.renewed_after = None
        assert generate(made, prompts, 20) != expected


@pytest.mark.slow
@pytest.mark.parametrize(("name", "recipe"), [("phi3", "ladder"), ("dynamic", "ladder"), ("phi4_mini", "desync-2x")])
def test_conversions_are_verified_on_both_sides(name: str, recipe: str, tmp_path: Path) -> None:
    """On a shrunken copy, on two ranks, on the real weights in bf16; then at lengths of both sets of factors."""
    copy.deepcopy(model(name)).bfloat16().save_pretrained(tmp_path / "m")
    report = api.convert(tmp_path / "m", recipe, out=tmp_path / "out", tp=2, options=api.SaveOptions(verify="full"))
    assert any(check.startswith("real weights") for check in report.verification)
    if recipe == "ladder":
        loaded = api.load(tmp_path / "out", dtype=torch.float32)
        program = Ladder([0, 1, 2]).apply(trace(tmp_path / "m"))
        weights = load_weights(program, torch.float32)
        for length in (PRETRAINED, 40):
            ids = torch.randint(2, 250, (2, length))
            expected = simulate(program, ids, weights=weights)
            torch.testing.assert_close(logits(loaded, ids), expected, rtol=1e-3, atol=1e-3)


def test_tokens_that_ranks_share_are_refused_with_the_reason(sources: Any, tmp_path: Path) -> None:
    with pytest.raises(RewriterError, match="rotary scaling that depends on the length of a call"):
        api.convert(sources("phi3"), "ring-attention", out=tmp_path / "out", sp=2)
    assert not (tmp_path / "out").exists()


def test_commands_that_read_configs(sources: Any) -> None:
    config = sources("phi3") / "config.json"
    assert api.inspect(config, "ladder", tp=2).data["blocks"]
    assert emit_huggingface(Ladder([1, 2]).apply(trace(sources("phi3")))).modeling


@pytest.mark.slow
@pytest.mark.parametrize("name", ["phi3", "dynamic"])
def test_onnx_has_both_sides(name: str, sources: Any, tmp_path: Path) -> None:
    """The export is compared with torch at 21 tokens, beyond the boundary."""
    pytest.importorskip("onnxruntime")
    api.convert(sources(name), "ladder", out=tmp_path / "out", options=api.SaveOptions(verify="none"))
    api.export_onnx(tmp_path / "out", tmp_path / "model.onnx")

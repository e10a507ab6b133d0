"""Checkpoints in the forms in which they are published, from conversion to text on two ranks.

What weights stand for is known from packing them, so neither the code under test nor its reference says what is right;
where transformers reads a form on a CPU, it is asked too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import quantized_checkpoints
import torch
import zoo
from quantized_checkpoints import MAKERS
from ranks import run_ranks
from tiny_tokenizer import add_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

import rewriter as rw
from rewriter import RewriterError, api
from rewriter.check.comparison import Verification
from rewriter.check.real_weights import compare_ranks
from rewriter.check.saved_output import verify
from rewriter.convert.conversion import convert
from rewriter.convert.reshard import reshard
from rewriter.convert.save_options import SaveOptions
from rewriter.runtime.context import Context
from rewriter.runtime.loading import load
from rewriter.tracing import trace

# FP8 in blocks, scales in fp32 and bf16, with bf16 beside it; MXFP4 with bf16, AWQ and GPTQ with fp16; fp32 beside FP8
FORMS = {
    "fp8-blocks": "bfloat16",
    "fp8-experts": "bfloat16",
    "fp8-deepseek": "bfloat16",
    "fp8-channel": "bfloat16",
    "mxfp4": "bfloat16",
    "awq": "float16",
    "gptq": "float16",
    "bnb-nf4": "bfloat16",
    "bnb-int8": "float16",
}
LOADS = ("fp8-blocks", "fp8-experts", "mxfp4")  # transformers, on a CPU and without further packages


def logits_of(source: Path, meant: dict[str, torch.Tensor], ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Logits [B, S, V] of the eager model of `dtype` with the weights `meant`."""
    config = AutoConfig.from_pretrained(source)
    del config.quantization_config
    cls = type(AutoModelForCausalLM.from_config(config))
    options: dict[str, Any] = {"config": config, "state_dict": dict(meant), "attn_implementation": "eager"}
    with torch.no_grad():
        return cls.from_pretrained(None, dtype=dtype, **options).eval()(ids, use_cache=False).logits


def rank_logits(group: Any, out: Path, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return load(out, device="cpu")(ids, torch.arange(ids.shape[1])[None], Context())


def middle_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the tokens, the median relative difference: in 16 bits a router may choose another expert at one of them."""
    return float(((found - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)).median())


def check_ranks(source: Path, meant: dict[str, torch.Tensor], out: Path, dtype: torch.dtype) -> None:
    """Two ranks, in the dtype that transformers would load the checkpoint in."""
    ids = zoo.batch(1, 16)
    found = run_ranks(rank_logits, 2, out, ids)
    assert found[0].dtype == dtype
    assert middle_difference(found[0], logits_of(source, meant, ids, dtype)) <= 3e-2


@pytest.mark.parametrize(
    ("kind", "dtype", "named"),
    [
        ("fp8-experts", "bfloat16", True),
        ("fp8-blocks", "float32", False),
        *(
            pytest.param(kind, dtype, named, marks=pytest.mark.slow)
            for kind in MAKERS
            for dtype in ("bfloat16", "float16", "float32")
            for named in (True, False)
        ),
    ],
)
def test_ranks_compute_what_was_packed(tmp_path: Path, kind: str, dtype: str, named: bool) -> None:
    """In fp32 exactly, by the comparison of every conversion; and as they are, in the dtype of the checkpoint."""
    source, out, found = tmp_path / "source", tmp_path / "out", Verification()
    meant = quantized_checkpoints.make(kind, source, dtype, named=named)
    program = rw.rewrite(trace(source), "tensor-parallel", tp=2)
    rw.save(program, out, options=rw.SaveOptions(verify="none"))
    compare_ranks(program, {"tp": 2}, out, found)
    assert [check.name for check in found.checks] == ["real weights: sharded module on 2 ranks = original model"]
    check_ranks(source, meant, out, getattr(torch, dtype))


def test_some_weights_are_not_quantized_and_biases_have_another_dtype(tmp_path: Path) -> None:
    """As `ignored_layers` and `modules_to_not_convert` leave them."""
    source, out = tmp_path / "source", tmp_path / "out"
    pack, said = quantized_checkpoints.awq(16)
    meant = quantized_checkpoints.write(source, "qwen2", pack, said, dtype="float16", plain="v_proj.weight")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))  # beside scales and rest in fp16
    program = rw.rewrite(trace(source), "tensor-parallel", tp=2)
    rw.save(program, out, options=rw.SaveOptions(verify="none"))
    check_ranks(source, meant, out, torch.bfloat16)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("fp8-exponents", r"blocks of FP8 do not divide .*weight, .* without a GPU. .*--dequantize"),
        ("autofp8", r"does not know model\.layers\.0\..*\.weight_scale, and computes without it. .*--dequantize"),
    ],
)
def test_what_transformers_reads_otherwise_is_not_loaded_by_it(tmp_path: Path, kind: str, why: str) -> None:
    quantized_checkpoints.make(kind, tmp_path / "source", "bfloat16")
    rw.save(rw.rewrite(trace(tmp_path / "source"), "ladder"), tmp_path / "out", options=rw.SaveOptions(verify="none"))
    with pytest.raises(RewriterError, match=why):
        rw.load(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("dequantize", [False, True])
def test_a_published_form_is_converted_verified_and_generates(tmp_path: Path, kind: str, dequantize: bool) -> None:
    source, out, dtype = tmp_path / "source", tmp_path / "out", getattr(torch, FORMS[kind])
    meant = quantized_checkpoints.make(kind, source, FORMS[kind])
    add_tokenizer(source)
    report = convert(
        source, "tensor-parallel", out=out, tp=2, options=SaveOptions(verify="full", dequantize=dequantize)
    )
    checks = {name: value for name, value in report.verification.items() if str(name).startswith("real weights")}
    assert len(checks) == 3 + dequantize, checks
    assert {name for name in verify(out) if "golden" in name} >= {"adapted checkpoint = golden logits"}
    [text] = api.generate(out, ["def read_lines(path):"], max_new_tokens=4)
    assert len(text.tokens) == 4
    if dequantize or kind in LOADS:
        ids, model = zoo.batch(1, 16), AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True).eval()
        with torch.no_grad():
            found = model(ids, use_cache=False).logits
        assert middle_difference(found, logits_of(source, meant, ids, dtype)) <= 3e-2
    assert "real weights: sharded module on 1 rank = original model" in reshard(out, 1)

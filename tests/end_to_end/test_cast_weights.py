"""`--dtype`: weights are cast as transformers casts them, and verification finds out where they are not."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from quantized_checkpoints import draw_routing
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import rewriter as rw
from rewriter.adapt import output
from rewriter.check import real_weights
from rewriter.check.comparison import Verification
from rewriter.check.coverage.configs import registered_types, small_config
from rewriter.check.random_model import build_model
from rewriter.check.real_weights import RealWeights, compare_ranks, streamed_model
from rewriter.common.errors import RewriterError, VerificationError
from rewriter.emit.files import output_files, weights
from rewriter.ir import Program
from rewriter.tracing import trace
from rewriter.tracing.meta_model import build_skeleton
from rewriter.weights.plain_model import loaded_dtypes, plain_model

# What transformers has in fp32 in a model of 16 bits: a bias of the routing, named by the class; norms, in fp16 only; a
# router and a bias that their classes make in fp32.
TYPES = ("deepseek_v3", "gpt_oss", "hunyuan_v1_moe", "lfm2_moe")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Program]:
    """By type, the program of a small checkpoint, on two ranks."""

    @functools.cache
    def made(kind: str) -> Program:
        source, config = tmp_path_factory.mktemp(kind), small_config(kind)
        if kind == "deepseek_v3":
            config.num_hidden_layers, config.first_k_dense_replace = 2, 1
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        zoo.randomize(model, 0)
        draw_routing(model)
        model.save_pretrained(source)
        return rw.rewrite(trace(source), "tensor-parallel", tp=2)

    return made


def source_of(program: Program) -> Path:
    return Path(str(program.source.path))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "kind", [*TYPES, *(pytest.param(k, marks=pytest.mark.slow) for k in registered_types() if k not in TYPES)]
)
def test_what_stays_in_fp32_is_what_transformers_loads_so(kind: str, dtype: torch.dtype) -> None:
    try:
        skeleton = build_skeleton(small_config(kind))
    except RewriterError as error:
        pytest.skip(str(error))
    patterns = skeleton.fp32[str(dtype).removeprefix("torch.")]
    kept = {name for name in skeleton.model.state_dict() if any(re.search(p, name) for p in patterns)}
    loaded = loaded_dtypes(build_model(small_config(kind)).to("meta"), dtype)
    assert kept == {name for name, found in loaded.items() if found == torch.float32}
    assert kept or kind not in TYPES or (kind, dtype) == ("gpt_oss", torch.bfloat16)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("deepseek_v3", "bf16"),
        ("gpt_oss", "fp16"),
        pytest.param("deepseek_v3", "fp16", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "bf16", marks=pytest.mark.slow),
        pytest.param("hunyuan_v1_moe", "bf16", marks=pytest.mark.slow),
    ],
)
@pytest.mark.fast("gpt_oss-fp16")
def test_weights_are_cast_as_transformers_casts_them(
    programs: Callable[[str], Program], kind: str, dtype: str, tmp_path: Path
) -> None:
    program, target = programs(kind), output_files.DTYPES[dtype]
    source = source_of(program)
    rw.save(program, tmp_path / "out", options=rw.SaveOptions(dtype=dtype, verify="none"))
    AutoModelForCausalLM.from_pretrained(source, dtype=target).save_pretrained(tmp_path / "expected")
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "expected"))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, msg=name)
    streamed = streamed_model(source, False, target)
    for name, tensor in plain_model(source, dtype=target)[0].state_dict().items():
        path, _, leaf = name.rpartition(".")
        read = getattr(streamed.get_submodule(path), leaf)
        torch.testing.assert_close(read, tensor, rtol=0, atol=0, msg=name)


@torch.no_grad()
def test_ranks_of_cast_weights_equal_the_source_as_transformers_casts_it(
    programs: Callable[[str], Program], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Biases of the routing are near each other: rounded, they choose other experts."""
    program, found = programs("deepseek_v3"), Verification()
    rw.save(program, tmp_path / "right", options=rw.SaveOptions(dtype="bf16", verify="none"))
    compare_ranks(program, {"tp": 2}, tmp_path / "right", found, torch.bfloat16)
    RealWeights(program, output_files.plan(program, "bf16"), lambda *_: None).compare(found)
    assert len(found.checks) == 3
    monkeypatch.setattr(weights, "kept_in_fp32", lambda *_: False)
    rw.save(program, tmp_path / "wrong", options=rw.SaveOptions(dtype="bf16", verify="none"))
    with pytest.raises(VerificationError, match="real weights: sharded module on 2 ranks = original model"):
        compare_ranks(program, {"tp": 2}, tmp_path / "wrong", Verification(), torch.bfloat16)
    with pytest.raises(VerificationError, match="rewritten, as written = original model, rounded by transformers"):
        RealWeights(program, output_files.plan(program, "bf16"), lambda *_: None).compare(Verification())


def test_drift_is_from_the_weights_as_they_were(
    programs: Callable[[str], Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not from weights that were rounded as the output's are."""
    source = source_of(programs("gpt_oss"))
    program = rw.rewrite(trace(source), "ladder", tp=1)
    monkeypatch.setattr(real_weights, "drift", lambda *_, **given: given)
    seen: Any = RealWeights(program, output_files.plan(program, "bf16"), lambda *_: None).drift(Verification(), None)
    name = "model.layers.0.self_attn.o_proj.weight"
    stored = load_file(source / "model.safetensors")[name]
    assert torch.equal(seen["weights"][name], stored)
    assert torch.equal(seen["rewritten_weights"][name], stored.bfloat16().float())


def test_trained_weights_are_rounded_as_transformers_casts_them(tmp_path: Path) -> None:
    config = small_config("hunyuan_v1_moe")
    config.save_pretrained(tmp_path)
    model = build_model(config)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    output.round_to(model, tmp_path, "bfloat16")
    for name, tensor in model.named_parameters():
        kept = name.endswith("gate.wg.weight")
        assert torch.equal(tensor, before[name] if kept else before[name].bfloat16().float()), name

"""Checkpoints whose tensors are stored in several dtypes: ranks compute in the one that transformers casts them to."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zoo
from oracles import relative_error
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import rewriter as rw
from rewriter.check.coverage.configs import small_config
from rewriter.emit.files.weights import cast_dtypes
from rewriter.ir import Program
from rewriter.runtime import Context, load
from rewriter.weights import Checkpoint

FP64, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16
IDS = zoo.batch(1, 9)

Pick = Callable[[str], torch.dtype]
MIXED: dict[str, tuple[Pick, str | None, torch.dtype]] = {
    "norms in fp32": (lambda name: FP32 if "norm" in name else BF16, "bfloat16", BF16),
    "the head in fp32": (lambda name: FP32 if "lm_head" in name else BF16, "bfloat16", BF16),
    "embeddings in fp64": (lambda name: FP64 if "embed" in name else FP32, "float32", FP32),
    "a config without dtype": (lambda name: FP32 if "norm" in name else BF16, None, BF16),
}


def source(path: Path, dtype: Pick, declared: str | None, family: str = "llama") -> Path:
    zoo.save(family, path)
    tensors = {name: tensor.to(dtype(name)) for name, tensor in load_file(path / "model.safetensors").items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config.pop("dtype", None)
    (path / "config.json").write_text(json.dumps(config | ({"dtype": declared} if declared else {})))
    return path


def expected(path: Path) -> torch.Tensor:
    """As transformers computes by default."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", trust_remote_code=True).eval()
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


def rank_logits(group: object, directory: str) -> torch.Tensor:
    model = load(directory, device="cpu")
    with torch.no_grad():
        found: torch.Tensor = model(IDS, torch.arange(9)[None], Context())
    return found


def casts_of(program: Program) -> dict[str, str]:
    checkpoint = Checkpoint.open(str(program.source.path))
    return cast_dtypes(program, checkpoint, checkpoint.dtypes, program.source.config)


@pytest.mark.parametrize("case", MIXED)
@pytest.mark.parametrize("materialize", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.fast("False-norms in fp32")
def test_ranks_compute_in_one_dtype(case: str, materialize: bool, tmp_path: Path) -> None:
    dtype, declared, computed = MIXED[case]
    path = source(tmp_path / "source", dtype, declared)
    rw.save(
        rw.rewrite(rw.trace(path), "tensor-parallel", tp=2),
        out := tmp_path / "out",
        options=rw.SaveOptions(verify="none", materialize=materialize),
    )
    right, adapted = expected(path), expected(out)
    assert right.dtype == adapted.dtype == computed
    for found in run_ranks(rank_logits, 2, str(out)):
        assert found.dtype == computed
        assert relative_error(found.float(), right.float()) <= (
            1e-5 if computed == FP32 else 3e-2
        )  # bf16 rounds by 4e-3
    assert adapted.equal(right)


def test_what_is_stored_alike_is_computed_with_as_it_is(tmp_path: Path) -> None:
    path = source(tmp_path / "source", lambda _: BF16, "float32")
    assert casts_of(rw.trace(path)) == {}


def test_what_transformers_keeps_in_fp32_stays_so(tmp_path: Path) -> None:
    path = source(tmp_path / "source", lambda name: FP32 if "norm" in name else BF16, "bfloat16")
    program = rw.trace(path)
    norms = {name for name in program.parameters if "norm" in name}
    assert casts_of(program) == dict.fromkeys(norms, "BF16")
    kept = program.with_(source=replace(program.source, fp32={"bfloat16": ("norm", ".*.mlp.down"), "float16": ()}))
    down = {name for name in program.parameters if "down_proj" in name}
    assert len(down) == 4
    assert casts_of(kept) == dict.fromkeys(down, "F32")


@pytest.mark.parametrize("materialize", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_parts_of_one_parameter_may_be_stored_in_several_dtypes(tmp_path: Path, materialize: bool) -> None:
    path = source(tmp_path / "source", lambda name: FP32 if "q_proj" in name else BF16, "bfloat16")
    program = rw.rewrite(rw.trace(path), "tensor-parallel", tp=2)
    rw.save(program, tmp_path / "out", options=rw.SaveOptions(verify="none", materialize=materialize))
    right = expected(path)
    for found in run_ranks(rank_logits, 2, str(tmp_path / "out")):
        assert found.dtype == BF16
        assert relative_error(found.float(), right.float()) <= 3e-2


@pytest.mark.parametrize("all_in_16_bits", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_router_that_its_class_makes_in_fp32_stays_so(tmp_path: Path, all_in_16_bits: bool) -> None:
    """transformers casts what the router is given for it, which a trace with all weights in 16 bits does not show."""
    model = AutoModelForCausalLM.from_config(small_config("hunyuan_v1_moe"), dtype=FP32)
    zoo.randomize(model, 0)
    model.save_pretrained(tmp_path / "fp32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "fp32", dtype=BF16)
    model = model.to(BF16) if all_in_16_bits else model
    model.save_pretrained(path := tmp_path / "source")
    rw.save(
        rw.rewrite(rw.trace(path), "tensor-parallel", tp=2), tmp_path / "out", options=rw.SaveOptions(verify="none")
    )
    right = expected(path).float()
    for found in run_ranks(rank_logits, 2, str(tmp_path / "out")):
        assert found.dtype == BF16
        difference = (found.float() - right).norm(dim=-1) / right.norm(dim=-1)
        assert float(difference.median()) <= 3e-2  # a router may choose another expert at one token

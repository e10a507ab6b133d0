"""Configs and small files of a model that no model can have: refused by name, before anything is built or written."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from refusals import Capture, refused
from repository import ROOT
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import rewriter as rw
from rewriter.check.coverage.configs import registered_types, small_config
from rewriter.cli import main
from rewriter.common.errors import RewriterError
from rewriter.common.processes import environment
from rewriter.tracing.meta_model import _parameters_on_meta, build_on_meta, build_skeleton, check_sizes, check_values


def spoil(model: Path, **values: Any) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **values}))


def dry_run(capsys: Capture) -> str:
    return refused(capsys, "m", "--recipe", "ladder", "--out", "out", "--verify", "none", "--dry-run")


SIZES = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "vocab_size")


@pytest.mark.parametrize(("name", "value"), [*((name, 0) for name in SIZES), ("head_dim", -1), ("vocab_size", 10**9)])
def test_a_size_that_no_model_has(model: Path, capsys: Capture, name: str, value: int) -> None:
    spoil(model, **{name: value})
    for message in (refused(capsys, "inspect", "m"), dry_run(capsys)):
        assert "fault of rewriter" not in message
        # transformers itself compares heads with the hidden size
        assert f"{name} is {value}, expected 1 to" in message or "its config cannot be read" in message


def test_a_padding_token_outside_of_the_vocabulary(model: Path, capsys: Capture) -> None:
    spoil(model, vocab_size=4, pad_token_id=10)
    assert "cannot be built as a causal LM: AssertionError: Padding_idx must be within" in refused(
        capsys, "inspect", "m"
    )


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_parameters.rope_theta is 0, expected a"),
        ({"rope_theta": -10000.0}, "rope_theta is -10000.0, expected a base above 0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope_scaling.factor is 0, expected a factor above 0"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": -2.0}},
            "rope_parameters.factor is -2.0",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0, 0.0]}},
            "rope_scaling.long_factor is 0.0, exp",
        ),
        ({"dtype": "auto"}, "dtype is 'auto', expected a name such as 'bfloat16'"),
        ({"torch_dtype": "torch.float16"}, "torch_dtype is 'torch.float16', expected a name such as"),
        ({"layer_scales": [1.0, math.nan]}, "layer_scales is nan, expected a number"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan, expected a number"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0, expected a small number, 0 or more"),
    ],
    ids=str,
)
def test_numbers_with_which_nothing_can_be_computed(
    model: Path, capsys: Capture, values: dict[str, Any], said: str
) -> None:
    spoil(model, **values)
    assert f"m/config.json: {said}" in dry_run(capsys)


def test_infinity_has_its_uses(model: Path) -> None:
    spoil(model, time_step_limit=[0.0, math.inf], time_step_max=math.inf)
    assert main(["inspect", "m", "--json"]) == 0


@pytest.mark.parametrize("depth", [100, 2_000, 100_000])
def test_a_config_that_is_nested_absurdly(model: Path, capsys: Capture, depth: int) -> None:
    (model / "config.json").write_text('{"model_type": "llama", "x": ' + "[" * depth + "]" * depth + "}")
    assert "m/config.json: nested deeper than 64 levels" in refused(capsys, "inspect", "m")
    assert "m/config.json: nested deeper than 64 levels" in dry_run(capsys)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not valid JSON"),
        ("[]", "it holds a list, not an object"),
        ("[" * 2_000, "nested deeper than 64 levels"),
        ('{"eos_token_id": "x"}', "eos_token_id is 'x', expected a token's number or a list of them"),
        ('{"eos_token_id": [1, null]}', "eos_token_id is [1, None], expected"),
    ],
    ids=lambda value: value[:30],
)
def test_a_generation_config_that_is_none(model: Path, capsys: Capture, text: str, said: str) -> None:
    assert main(["m", "--recipe", "ladder", "--out", "out", "--verify", "none"]) == 0
    capsys.readouterr()
    for directory in (model, Path("out")):
        (directory / "generation_config.json").write_text(text)
    assert f"out/generation_config.json: {said}" in refused(capsys, "generate", "out", "--prompt", "x")
    message = refused(capsys, "m", "--recipe", "ladder", "--out", "other", "--verify", "none")
    assert f"m/generation_config.json: {said}" in message


def test_a_broken_config_of_an_output_is_told_as_that(model: Path, capsys: Capture) -> None:
    assert main(["m", "--recipe", "ladder", "--out", "out", "--verify", "none"]) == 0
    capsys.readouterr()
    Path("out/config.json").write_text('{"model_type": ')
    for command in (["generate", "out", "--prompt", "x"], ["reshard", "out", "--tp", "2"]):
        assert "out/config.json: not valid JSON" in refused(capsys, *command)
    Path("out/config.json").write_text(Path("m/config.json").read_text())
    Path("out/tokenizer.json").write_text("{")
    assert "transformers cannot load its tokenizer (tokenizer.json)" in refused(
        capsys, "generate", "out", "--prompt", "x"
    )


# What the config says of weights, and what they are


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"quant_method": "fp8", "weight_block_size": [16, 16]}, "weights are quantized (fp8 in blocks of 16×16), but"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "but none of the tensors is"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "but none of the tensors is"),
        ({"quant_method": "fp8", "weight_block_size": "x"}, "its quantization_config is not as known (IndexError"),
        (
            {"quant_method": "compressed-tensors", "config_groups": [1]},
            "quantization_config is not as known (Attribute",
        ),
        ({"bits": 4}, "its weights are quantized by unknown, 4 bits, which is not supported"),
        ("fp8", "its config cannot be read"),
    ],
    ids=str,
)
def test_a_quantization_of_weights_that_are_not_quantized(
    model: Path, capsys: Capture, said: Any, message: str
) -> None:
    spoil(model, quantization_config=said)
    assert message in refused(capsys, "m", "--recipe", "ladder", "--out", "out", "--verify", "none")


@pytest.mark.parametrize("said", [{}, None])
@pytest.mark.fast("None")
def test_an_empty_quantization_is_left_out(model: Path, said: Any) -> None:
    spoil(model, quantization_config=said)
    rw.save(rw.rewrite(rw.trace(model), "ladder"), "out", options=rw.SaveOptions(verify="none"))
    assert "quantization_config" not in json.loads(Path("out/config.json").read_text())
    AutoModelForCausalLM.from_pretrained("out", trust_remote_code=True)


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [(torch.int64, "I64"), (torch.int8, "I8"), (torch.bool, "BOOL"), (torch.uint8, "U8"), (torch.complex64, "C64")],
)
def test_weights_that_are_no_floating_point_numbers(
    model: Path, capsys: Capture, dtype: torch.dtype, stored: str
) -> None:
    tensors, name = load_file(model / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    tensors[name] = torch.zeros_like(tensors[name]).to(dtype)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    message = refused(capsys, "m", "--recipe", "ladder", "--out", "out", "--verify", "none")
    assert message.startswith(f"{name}: the checkpoint in m stores it as {stored}, and a model computes with floating")


# Built without memory


def test_parameters_of_any_size_are_never_in_memory() -> None:
    """400 TB of experts, as one tensor."""
    sizes = dict(hidden_size=1 << 20, num_experts=1 << 16, moe_intermediate_size=768, num_hidden_layers=1)
    skeleton = build_skeleton(AutoConfig.for_model("qwen3_moe", **sizes, num_attention_heads=64, head_dim=64))
    assert max(p.numel() for p in skeleton.model.parameters()) > 1 << 46
    assert all(p.is_meta for p in skeleton.model.parameters())
    assert all(b.abs().sum() > 0 for b in skeleton.buffers.values())
    assert skeleton.buffers


def test_a_model_that_fills_what_torch_empty_made_is_built_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    config = zoo.config("llama")
    made = AutoModelForCausalLM.from_config

    def with_table(*arguments: Any, **options: Any) -> Any:
        model = made(*arguments, **options)
        table = torch.empty(3)
        table[:] = torch.tensor([1.0, 2.0, 3.0])
        model.register_buffer("table", table)
        return model

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", with_table)
    model = build_on_meta(config, torch.float32)
    assert model.table.tolist() == [1.0, 2.0, 3.0]
    assert all(p.is_meta for p in model.parameters())


SIZE = """
import resource, sys, time
from rewriter import api
command, path = sys.argv[1:]
if command == "inspect":
    print(api.inspect(path, "ladder", tp=8).data["model"]["parameters"])
else:
    found = api.predict(path, ["tensor-parallel", "ladder"], tp=8, fabric="h100-nvlink").predictions
    print(found[1].recipe == "ladder" and found[1].decode.seconds > 0)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, time.process_time())
"""
LARGEST = {
    "DeepSeek-V3": (671e9, dict(
        model_type="deepseek_v3", hidden_size=7168, num_hidden_layers=61, num_attention_heads=128,
        num_key_value_heads=128, intermediate_size=18432, moe_intermediate_size=2048, n_routed_experts=256,
        n_shared_experts=1, num_experts_per_tok=8, n_group=8, topk_group=4, first_k_dense_replace=3, vocab_size=129280,
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        max_position_embeddings=4096, torch_dtype="bfloat16",
    )),
    "Qwen3 MoE of 256 experts": (811e9, dict(
        model_type="qwen3_moe", hidden_size=7168, num_hidden_layers=94, num_attention_heads=64, num_key_value_heads=8,
        head_dim=128, intermediate_size=12288, moe_intermediate_size=1536, num_experts=256, num_experts_per_tok=8,
        vocab_size=151936, max_position_embeddings=4096, torch_dtype="bfloat16",
    )),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("command", ["inspect", "predict"])
@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_open_models_need_a_small_machine(name: str, command: str, tmp_path: Path) -> None:
    """0.7 to 1.3 GB of memory (most of it torch's), and 7 to 11 s of one core."""
    parameters, config = LARGEST[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = [sys.executable, "-c", SIZE, command, str(tmp_path / "config.json")]
    done = subprocess.run(words, env=environment(1), cwd=ROOT, capture_output=True, text=True, check=True)
    result, megabytes, seconds = done.stdout.split()[-3:]
    assert float(result) == pytest.approx(parameters, rel=1e-2) if command == "inspect" else result == "True"
    assert float(megabytes) < 1500
    assert float(seconds) < 15


# What exists is not refused


@pytest.mark.slow
def test_no_type_of_transformers_is_refused_for_its_defaults_or_built_otherwise() -> None:
    """Each with the buffers that it has where its parameters are made in memory first."""
    compared = 0
    for model_type in registered_types():
        config = _made(lambda model_type=model_type: AutoConfig.for_model(model_type))
        if config is not None:
            check_sizes(config)
            check_values(model_type, config.to_dict())
        small = _made(lambda model_type=model_type: small_config(model_type))
        if small is None:
            continue
        check_sizes(small)
        with _parameters_on_meta():
            expected = _made(lambda small=small: AutoModelForCausalLM.from_config(small, dtype=torch.float32))
        if expected is None:
            continue
        found = build_on_meta(small, torch.float32)
        assert all(p.is_meta for p in found.parameters()), model_type
        buffers = dict(found.named_buffers())
        for name, buffer in expected.named_buffers():
            torch.testing.assert_close(buffers[name], buffer, rtol=0, atol=0, equal_nan=True)
        compared += 1
    assert compared >= 160


def _made(make: Callable[[], Any]) -> Any:
    """What `make` gives; None for a type that transformers itself cannot make without more."""
    try:
        return make()
    except Exception:
        return None


def test_an_absurd_integer_is_shown_shortly() -> None:
    with pytest.raises(RewriterError, match="hidden_size is 1000") as refusal:
        check_sizes(AutoConfig.for_model("llama", hidden_size=10**4000, num_attention_heads=1))
    assert len(str(refusal.value)) < 300

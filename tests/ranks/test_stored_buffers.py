"""Buffers whose values lie in checkpoints (a router's correction bias): read from there, other for every layer."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from oracles import relative_error
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rewriter import api
from rewriter.common.errors import RewriterError
from rewriter.ir import Body, Program, walk_modules
from rewriter.ir.simulate import simulate
from rewriter.passes import available
from rewriter.runtime import Context, load
from rewriter.tracing import trace

pytestmark = pytest.mark.tracer

_COMMON: dict[str, Any] = dict(
    vocab_size=256, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    max_position_embeddings=192, pad_token_id=0, bos_token_id=1, eos_token_id=None, intermediate_size=112,
)  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "glm4_moe": _COMMON
    | dict(
        moe_intermediate_size=48, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, n_group=2,
        topk_group=1, first_k_dense_replace=1, norm_topk_prob=True,
    ),
    "apertus": _COMMON,
}  # fmt: skip
BIAS = "model.layers.{}.mlp.gate.e_score_correction_bias"


def save(model_type: str, directory: Path) -> Any:
    """A model whose stored buffers are random and decide what is computed, as its Hugging Face directory."""
    config = AutoConfig.for_model(model_type, **CONFIGS[model_type])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    model.set_experts_implementation("eager")
    zoo.randomize(model, 0)
    generator = torch.Generator().manual_seed(7)
    for name in sorted(model.state_dict().keys() - dict(model.named_parameters()).keys()):
        buffer = model.get_buffer(name)
        buffer.add_(0.3 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(directory)
    return model


traced = functools.cache(trace)


@pytest.fixture(scope="module", params=["glm4_moe", pytest.param("apertus", marks=pytest.mark.slow)])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    directory = tmp_path_factory.mktemp(request.param) / "source"
    return save(request.param, directory), directory


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_trace_computes_with_the_values_of_the_checkpoint(saved: tuple[Any, Path], ranks: int) -> None:
    model, directory = saved
    program = traced(directory).with_(mesh={"tp": ranks})
    program = available()["tensor_parallel"]().apply(program)
    assert not program.history[-1].notes
    for length in (1, 21, 100):
        ids = zoo.batch(2, length)
        with torch.no_grad():
            expected = model(ids, use_cache=False).logits
            assert relative_error(simulate(program, ids), expected) <= 1e-5


def test_every_layer_has_values_of_its_own_though_bodies_are_shared(saved: tuple[Any, Path]) -> None:
    model, directory = saved
    program = traced(directory)
    stored = sorted(model.state_dict().keys() - dict(model.named_parameters()).keys())
    assert set(stored) <= set(program.parameters)
    bodies = [b for _, b in walk_modules(program.modules) if isinstance(b, Body) and b.stored]
    assert len({id(b) for b in bodies}) < len(bodies)
    ids = zoo.batch()
    expected = simulate(program, ids)
    weights = {n: t for n, t in model.state_dict().items() if n in program.parameters}
    for name in (n for n in stored if not n.endswith("act_fn.eps")):  # that one bounds a vanishing exponent
        rolled = weights | {name: weights[name].roll(1) if weights[name].ndim else weights[name] + 1}
        assert relative_error(simulate(program, ids, weights=rolled), expected) >= 1e-3, name


def on_rank(group: Any, directory: Path, ids: torch.Tensor, dtype: torch.dtype | None) -> tuple[torch.Tensor, Any]:
    model = load(directory, dtype=dtype)
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    trained = {name for name, _ in model.named_parameters()}
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items() if name not in trained}
    with torch.no_grad():
        return model(ids, positions, Context()), dtypes


def test_a_conversion_keeps_them_on_both_sides(tmp_path: Path) -> None:
    """In the adapted checkpoint and in the ranks' files; as buffers, in float32 where the source keeps them so."""
    save("glm4_moe", tmp_path / "source")
    out = tmp_path / "out"
    api.convert(tmp_path / "source", "ladder", out=out, tp=2, options=api.SaveOptions(verify="none"))
    adapted = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True, attn_implementation="eager").eval()
    adapted.set_experts_implementation("eager")
    ids = zoo.batch()
    with torch.no_grad():
        expected = adapted(ids, use_cache=False).logits
    for logits, dtypes in run_ranks(on_rank, 2, out, ids, None):
        assert relative_error(logits, expected) <= 1e-4
        assert set(dtypes) == {BIAS.format(i) for i in (1, 2, 3)}
    for logits, dtypes in run_ranks(on_rank, 2, out, ids, torch.bfloat16):
        assert logits.dtype == torch.bfloat16
        assert set(dtypes.values()) == {torch.float32}


@pytest.mark.slow
def test_a_checkpoint_without_them_is_refused(tmp_path: Path) -> None:
    save("glm4_moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[BIAS.format(2)]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(RewriterError, match=r"lacks model.layers.2.mlp.gate.e_score_correction_bias"):
        trace(tmp_path)


@pytest.mark.slow
def test_the_text_says_which_tensors_are_not_trained() -> None:
    program: Program = trace(AutoConfig.for_model("glm4_moe", **CONFIGS["glm4_moe"]))
    assert "e_score_correction_bias: buffer[8]" in program.text()

"""Projections of one value as one product: the same function, gradients and weights, and what stays apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from oracles import relative_error
from programs import PASSES, tensor_parallel, traced, weights

from rewriter.common.errors import RewriterError
from rewriter.ir import Body, Program
from rewriter.ir.simulate import load_weights, simulate, whole_parameter
from rewriter.passes.fuse_projections import fused_name
from rewriter.tracing import trace


def sharded(name: str, tp: int, *passes: tuple[str, dict[str, Any]]) -> Program:
    return tensor_parallel(traced(name), tp, *passes)


PARALLEL = (("parallel_block", {}), ("merge_reductions", {}))


def gradients(program: Program, name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, and gradients by the names that the weights had before anything was fused."""
    leaves = {n: t.clone().requires_grad_() for n, t in weights(name).items()}
    logits = simulate(program, zoo.batch(2, 13, zoo.shared(name).config.vocab_size), weights=leaves)
    logits.square().mean().backward()
    return logits.detach(), {n: t.grad for n, t in leaves.items() if t.grad is not None}


@pytest.mark.parametrize(
    ("name", "tp", "passes"),
    [
        ("llama", 4, PARALLEL),  # fewer key/value heads than ranks
        ("llama", 1, ()),
        ("gpt2", 2, PARALLEL),  # Conv1D with biases
        ("qwen2", 2, ()),
        ("mixtral", 2, PARALLEL),
    ],
)
def test_fused_projections_compute_the_same_with_the_same_gradients(name: str, tp: int, passes: Any) -> None:
    before = sharded(name, tp, *passes)
    after = PASSES["fuse_projections"]().apply(before)
    assert after.history[-1].fired
    expected, wanted = gradients(before, name)
    logits, found = gradients(after, name)
    assert relative_error(logits, expected) <= 1e-5
    assert found.keys() == wanted.keys()
    for parameter, gradient in wanted.items():
        assert relative_error(found[parameter], gradient) <= 1e-5, parameter


def test_a_parallel_block_with_one_norm_has_one_entry_projection() -> None:
    fused = PASSES["fuse_projections"]().apply(sharded("llama", 2, *PARALLEL))
    block = fused.modules["model.layers.0.self_attn_mlp"]
    assert isinstance(block, Body)
    assert sorted(block.modules) == ["mlp.down_proj", "qkv_gate_up_proj", "self_attn.o_proj"]
    config = zoo.config("llama")
    heads = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    assert block.modules["qkv_gate_up_proj"].options["out_features"] == (heads + 2 * config.intermediate_size) // 2
    assert fused.modules["model.layers.3.self_attn_mlp"] is block  # alike layers stay alike
    assert not any("q_proj" in name or "gate_proj" in name for name in fused.parameters)


@pytest.mark.parametrize("tp", [2, 4])
def test_a_ranks_part_of_a_fused_weight_is_its_parts_of_the_sources(tp: int) -> None:
    before = sharded("llama", tp, *PARALLEL)
    after = PASSES["fuse_projections"]().apply(before)
    spec = after.parameters["model.layers.1.self_attn_mlp.qkv_gate_up_proj.weight"]
    whole = whole_parameter("", spec, weights("llama"))
    assert tuple(whole.shape) == spec.full_shape
    assert spec.shared == (tp == 4)  # two key/value heads on four ranks
    for rank in range(tp):
        held = torch.cat([whole[a:b] for a, b in spec.ranges[rank]])
        assert tuple(held.shape) == spec.shape
        parts = []
        for source in spec.parts:
            known = before.parameters[source]
            parts += [weights("llama")[source][a:b] for a, b in known.ranges[rank]]
        assert torch.equal(held, torch.cat(parts))


def test_a_fused_weight_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    zoo.save("llama", tmp_path)
    program = tensor_parallel(trace(tmp_path), 2, ("fuse_projections", {}))
    loaded = load_weights(program)
    name = "model.layers.0.mlp.gate_up_proj.weight"
    assert torch.equal(loaded[name], whole_parameter(name, program.parameters[name], weights("llama")))


def test_biases_are_all_or_none() -> None:
    """Qwen2 has biases on queries, keys and values and none in its MLP."""
    fused = PASSES["fuse_projections"]().apply(sharded("qwen2", 2, *PARALLEL))
    assert "model.layers.0.self_attn" in fused.modules
    assert fused.history[-1].notes == (
        "model.layers.0 and 3 like it: its self_attn and mlp stay apart: some have a bias and some have not",
    )


def test_nothing_to_fuse_is_said() -> None:
    """GPT-NeoX projects queries, keys and values together, and its halves have a norm each."""
    record = PASSES["fuse_projections"]().apply(sharded("gpt_neox", 2)).history[-1]
    assert not record.fired
    assert record.summary == "no projections that could be one read the same value"


def test_the_order_of_passes_is_checked() -> None:
    with pytest.raises(RewriterError, match="put tensor_parallel before it"):
        PASSES["fuse_projections"]().apply(traced("llama").with_(mesh={"tp": 2}))
    scheduled = sharded("llama", 2, ("ladder", {}), ("overlap", {}))
    with pytest.raises(RewriterError, match="Put overlap after it"):
        PASSES["fuse_projections"]().apply(scheduled)


def test_items_of_lists_are_named_after_them() -> None:
    """Adapters of zamba2's queries, keys and values are linear_q_adapter_list.0.0 and so on."""
    assert fused_name(["a.q_proj", "a.k_proj", "a.v_proj"], []) == "a.qkv_proj"
    assert fused_name(["a.q_list.0.1", "a.k_list.0.1"], []) == "a.q_list_0_1_k_list_0_1"
    assert fused_name(["0", "1"], []) == "item_0_item_1"
    assert fused_name(["a.gate_proj", "b.up_proj"], ["gate_up_proj"]) == "gate_up_proj_2"

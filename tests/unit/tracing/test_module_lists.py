"""Modules in lists and under names that are no identifiers: one norm per head, as ranks split it and as printed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import relative_error
from torch import fx, nn
from transformers import AutoModelForCausalLM, StableLmConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.stablelm import modeling_stablelm

from rewriter.emit.huggingface import emit_huggingface
from rewriter.emit.module import emit_runtime_module
from rewriter.emit.module.classes import ClassTable
from rewriter.ir import Body, Leaf, Program
from rewriter.ir.simulate import simulate
from rewriter.passes.ladder import Ladder
from rewriter.passes.tensor_parallel import TensorParallel
from rewriter.runtime import RuntimeModel
from rewriter.tracing import trace

NORMS = {
    "without bias": lambda size, eps: nn.LayerNorm(size, eps=eps, bias=False),
    "with bias": lambda size, eps: nn.LayerNorm(size, eps=eps),
    "RMS": LlamaRMSNorm,
}


@pytest.fixture(params=NORMS)
def norm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """StableLM 2 12B has norms without bias; other kinds stand in their place."""

    def init(self: Any, dim: int, num_heads: int, eps: float = 1e-5, bias: bool = False) -> None:
        nn.Module.__init__(self)
        self.norms = nn.ModuleList([NORMS[request.param](dim, eps) for _ in range(num_heads)])

    monkeypatch.setattr(modeling_stablelm.StableLmLayerNormPerHead, "__init__", init)


def model() -> Any:
    """StableLM 2 12B, small, with random norms. 8 query heads share 4 key/value heads."""
    config = StableLmConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, intermediate_size=96,
        vocab_size=128, max_position_embeddings=64, qk_layernorm=True, use_parallel_residual=True,
    )  # fmt: skip
    torch.manual_seed(0)
    built = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return built


def on_ranks(program: Program, ranks: int) -> Program:
    return TensorParallel().apply(program.with_(mesh={"tp": ranks}, origin=program))


@pytest.mark.usefixtures("norm")
@torch.no_grad()
@pytest.mark.fast("RMS")
def test_one_norm_per_head_is_split_by_heads() -> None:
    """At 8 ranks, two hold each key/value head."""
    built = model()
    program, weights = trace(built.config), {n: p.detach() for n, p in built.named_parameters()}
    ids = torch.randint(0, 128, (2, 21))
    expected = built(input_ids=ids).logits
    assert relative_error(simulate(program, ids, weights=weights), expected) <= 1e-5
    for ranks in (2, 4, 8):
        split = on_ranks(program, ranks)
        assert split.history[-1].notes == ()  # nothing is replicated
        assert relative_error(simulate(split, ids, weights=weights), expected) <= 1e-5
        compile(emit_runtime_module(split), "module.py", "exec")


@torch.no_grad()
def test_the_printed_module_computes_the_same() -> None:
    built = model()
    program = trace(built.config)
    scope: dict[str, Any] = {}
    exec(emit_runtime_module(program), scope)
    printed: RuntimeModel = scope["Model"]().eval()
    printed.load_state_dict(built.state_dict())  # under the names of the checkpoint
    ids = torch.randint(0, 128, (2, 21))
    assert relative_error(printed(ids), built(input_ids=ids).logits) <= 1e-5
    files = emit_huggingface(Ladder([0, 1]).apply(program))
    assert files.modeling is not None
    compile(files.modeling, "modeling.py", "exec")


def test_gradients_of_a_head_s_norm_are_the_sum_over_ranks() -> None:
    built = model()
    program = trace(built.config)
    weights = {n: p.detach().clone().requires_grad_() for n, p in built.named_parameters()}
    ids = torch.randint(0, 128, (1, 9))
    built(input_ids=ids).logits.square().sum().backward()
    simulate(on_ranks(program, 8), ids, weights=weights).square().sum().backward()
    for name in ("q_layernorm.norms.5.weight", "k_layernorm.norms.2.weight"):
        full = f"model.layers.0.self_attn.{name}"
        assert relative_error(weights[full].grad, built.get_parameter(full).grad) <= 1e-4


def test_whatever_holds_a_child_it_is_printed_as_python() -> None:
    """Lists, lists in lists, gaps, dictionaries with any key, and lists of parameters."""
    linear = Leaf("Linear", {"in_features": 2, "out_features": 2, "bias": False}, {"weight": (2, 2)})
    names = ("a.0", "a.2", "b.1.0", "c.x-y.1", "c.class", "d", "e#1")
    graph = fx.Graph()
    value = graph.placeholder("x")
    for name in names:
        value = graph.call_module(name, (value,))
    for index in range(2):
        value = graph.call_function(torch.ops.aten.mul.Tensor, (value, graph.get_attr(f"scales.{index}")))
    graph.output(value)
    parameters = {f"scales.{i}": (2,) for i in range(2)}
    table = ClassTable()
    made = table.add(Body("Holder", graph, parameters, {}, dict.fromkeys(names, linear)))
    scope: dict[str, Any] = {"nn": nn, "torch": torch}
    exec(table.source(), scope)
    holder = scope[made.name]()
    state = {f"{name.replace('#', '_variant_')}.weight": torch.randn(2, 2) for name in names}
    state |= {f"scales.{i}": torch.randn(2) for i in range(2)}
    holder.load_state_dict(state)
    x = expected = torch.randn(3, 2)
    for name, tensor in state.items():
        expected = expected * tensor if name.startswith("scales") else expected @ tensor.T
    torch.testing.assert_close(holder(x), expected)

"""Experts with biases, transposed weights, gate and up in turns, limits, or no gate: found by value, split exactly."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import emitted
import pytest
import torch
import zoo
from emitted_ranks import compare_gradients, on_rank
from host_reads import HostReads
from oracles import relative_error
from programs import applied, runtime_case, tensor_parallel
from ranks import run_ranks
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from rewriter.common.errors import RewriterError
from rewriter.emit.huggingface import emit_huggingface
from rewriter.ir import Body, Program, ops
from rewriter.ir.simulate import simulate
from rewriter.passes import available
from rewriter.runtime.experts import experts
from rewriter.tracing import trace
from rewriter.tracing.interception import gate_of, is_experts

pytestmark = pytest.mark.tracer

_COMMON: dict[str, Any] = dict(
    vocab_size=256, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    max_position_embeddings=192, pad_token_id=0, bos_token_id=1, eos_token_id=None, intermediate_size=48,
)  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt_oss": _COMMON | dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=9, rope_parameters=_ROPE),
    "aria_text": _COMMON | dict(moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
    "minimax_m3_vl_text": _COMMON
    | dict(
        num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=48, dense_intermediate_size=48,
        rotary_dim=8, rope_parameters=_ROPE | {"partial_rotary_factor": 0.5},
    ),
    # all experts in one batched product, rotation by complex numbers
    "llama4_text": _COMMON
    | dict(
        num_local_experts=4, num_experts_per_tok=1, intermediate_size_mlp=48, attention_chunk_size=9,
        interleave_moe_layer_step=1, rope_parameters=_ROPE, attn_temperature_tuning=False,
    ),
}  # fmt: skip


@functools.cache
def traced(model_type: str) -> Program:
    return trace(AutoConfig.for_model(model_type, **CONFIGS[model_type]))


@functools.cache
def model_of(model_type: str) -> Any:
    if model_type not in CONFIG_MAPPING:
        pytest.skip("not in this release of transformers")
    config = AutoConfig.for_model(model_type, **CONFIGS[model_type])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    if model_type != "llama4_text" and not any(map(is_experts, model.modules())):
        pytest.skip("this release of transformers does not let an experts function compute them")
    model.set_experts_implementation("eager")
    zoo.randomize(model, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("proj_bias"):  # per expert, so that two dimensions do not make them weights
                parameter.mul_(3.0)
    return model


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("model_type", list(CONFIGS))
@pytest.mark.fast(*(f"{model_type}-{ranks}" for model_type in ("gpt_oss", "llama4_text") for ranks in (1, 2, 4)))
def test_traces_and_their_splits_equal_the_eager_model(model_type: str, ranks: int) -> None:
    model = model_of(model_type)
    program = applied(traced(model_type).with_(mesh={"tp": ranks}), ("tensor_parallel", {}))
    assert not program.history[-1].notes
    weights = {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}
    for length in (1, 21, 100):
        ids = zoo.batch(2, length)
        with torch.no_grad():
            expected = model(ids, use_cache=False).logits
            assert relative_error(simulate(program, ids, weights=weights), expected) <= 1e-5


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model_type", ["gpt_oss", "aria_text", "llama4_text"])
def test_emitted_modules_equal_the_eager_model_with_gradients(model_type: str, ranks: int) -> None:
    model = model_of(model_type)
    program = tensor_parallel(traced(model_type), ranks)
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    ids = zoo.batch()
    cases = [runtime_case(program, weights)]
    results = [on_rank(None, cases, ids, [], 0)] if ranks == 1 else run_ranks(on_rank, ranks, cases, ids, [], 0)
    model.zero_grad()
    logits = model(ids, use_cache=False).logits
    logits.square().mean().backward()
    for [(found, _, _)] in results:
        assert relative_error(found, logits.detach()) <= 1e-4
    compare_gradients(program, [gradients for [(_, gradients, _)] in results], model)


VARIANTS: dict[str, dict[str, Any]] = {
    "interleaved": {"act": "silu", "layout": "interleaved", "limit": 0.7, "slope": 1.702, "offset": 1.0},
    "ungated": {"act": "relu2", "layout": "ungated"},
    "concatenated": {"act": "gelu", "limit": 0.5},
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_the_runtime_computes_what_the_specification_says(
    variant: str, biased: bool, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = torch.Generator().manual_seed(0)
    rows = 4 if variant == "ungated" else 8
    x, weight = torch.randn(9, 6, generator=random), torch.rand(9, 2, generator=random)
    index = torch.randint(0, 6, (9, 2), generator=random)  # 5 is no expert
    up, down = torch.randn(5, rows, 6, generator=random), torch.randn(5, 6, 4, generator=random)
    biases = (torch.randn(5, rows, generator=random), torch.randn(5, 6, generator=random)) if biased else ()
    plain = ops.experts(x, index, weight, up, down, *biases, **VARIANTS[variant])
    if transposed:
        up, down = up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    options = VARIANTS[variant] | {"transposed": transposed}
    torch.testing.assert_close(ops.experts(x, index, weight, up, down, *biases, **options), plain)
    torch.testing.assert_close(experts(x, index, weight, up, down, *biases, **options), plain)
    # the same of few tokens, as a GPU decodes them: no value is read on the host
    weight[3, 1] = torch.inf  # of no expert
    index[3, 1] = 5
    monkeypatch.setattr(sys.modules[experts.__module__], "host_waits", lambda x: True)
    for some in (slice(3, 4), slice(0, 8)):
        with torch.no_grad(), HostReads() as reads:
            few = experts(x[some], index[some], weight[some], up, down, *biases, **options)
        assert not reads.counts
        torch.testing.assert_close(few, ops.experts(x[some], index[some], weight[some], up, down, *biases, **options))
    with HostReads() as reads:
        experts(x, index, weight, up, down, *biases, **options)
    assert reads.counts  # of many tokens


class _Gate(nn.Module):
    """What `gate_of` reads of an experts module."""

    has_gate = True

    def __init__(self, gate: Any, **numbers: float) -> None:
        super().__init__()
        self.gate = SimpleNamespace(apply=gate)
        for name, number in numbers.items():
            setattr(self, name, number)

    def _apply_gate(self, h: torch.Tensor) -> torch.Tensor:
        return self.gate.apply(self, h)


def _swiglu(self: Any, h: torch.Tensor) -> torch.Tensor:
    gate, up = h[..., ::2], h[..., 1::2]
    gate, up = gate.clamp(max=self.most), up.clamp(-self.most, self.most)
    return gate * torch.sigmoid(gate * self.steep) * (up + 1)


def test_how_experts_gate_is_found_by_value() -> None:
    found = gate_of(_Gate(_swiglu, most=7.0, steep=1.702, unrelated=3.0))
    assert found == {"act": "silu", "layout": "interleaved", "limit": 7.0, "slope": 1.702, "offset": 1.0}
    halves = gate_of(_Gate(lambda self, h: nn.functional.gelu(h.chunk(2, -1)[0].float()) * h.chunk(2, -1)[1].float()))
    assert halves == {"act": "gelu"}


def test_a_gate_of_another_form_is_refused() -> None:
    with pytest.raises(RewriterError, match="none of the known forms"):
        gate_of(_Gate(lambda self, h: torch.sin(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1]))
    with pytest.raises(RewriterError, match="none of the known forms"):  # up before gate
        gate_of(_Gate(lambda self, h: nn.functional.silu(h.chunk(2, -1)[1]) * h.chunk(2, -1)[0]))


class _CastsItsWeights(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float().softmax(-1, dtype=x.dtype) * x.softmax(-1, dtype=x.dtype)


def test_a_models_dtype_as_an_argument_follows_the_model() -> None:
    """It is the trace's own dtype there, in which a router's weights would have been rounded."""
    from rewriter.tracing.export import BodyTracer, Example
    from rewriter.tracing.interception import Recorded
    from rewriter.tracing.meta_model import TRACE_DTYPE

    x = torch.empty(5, 37, 8, dtype=TRACE_DTYPE, device="meta")
    body = BodyTracer({}, {}, Example()).trace("weights", _CastsItsWeights(), Recorded((x,), {}))
    assert isinstance(body, Body)
    assert not any(TRACE_DTYPE in (*node.args, *node.kwargs.values()) for node in body.graph.nodes)


@pytest.mark.parametrize(
    "model_type", [pytest.param(t, marks=() if t == "gpt_oss" else pytest.mark.slow) for t in CONFIGS]
)
@pytest.mark.slow
def test_adapted_checkpoints_load_and_compute_the_ladder(model_type: str, tmp_path: Path) -> None:
    """On disk some of them lie as their published checkpoints do, under other names and in other layouts."""
    model = model_of(model_type)
    model.save_pretrained(tmp_path / "source")
    program = available()["ladder"]().apply(trace(tmp_path / "source"))
    emitted.write(emit_huggingface(program), tmp_path / "source", tmp_path / "out")
    adapted = emitted.load(tmp_path / "out")
    ids = zoo.batch()
    with torch.no_grad():
        logits, original = adapted(ids, use_cache=False).logits, model(ids, use_cache=False).logits
    assert relative_error(simulate(program, ids), logits) <= 1e-5
    assert relative_error(logits, original) >= 1e-2

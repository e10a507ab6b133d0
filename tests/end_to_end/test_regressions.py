"""Models that once were traced to something else without a word."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from oracles import relative_error
from programs import applied
from torch import fx, nn
from transformers import AutoConfig, AutoModelForCausalLM

from rewriter.common.errors import RewriterError
from rewriter.ir import Body
from rewriter.ir.ops import MaskSpec
from rewriter.ir.simulate import simulate
from rewriter.passes.placement.placement_rules import reduce_over_ranks
from rewriter.passes.placement.units import Units
from rewriter.tracing import trace
from rewriter.tracing.assemble import ModelTracer
from rewriter.tracing.export import BodyTracer, Example
from rewriter.tracing.interception import Recorded, lifted_interfaces
from rewriter.tracing.masks import Static, find_mask_spec, seen_by
from rewriter.tracing.meta_model import TRACE_DTYPE, build_skeleton, fingerprint

pytestmark = pytest.mark.tracer

_LATENT: dict[str, Any] = {
    "model_type": "deepseek_v3", "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 112,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "moe_intermediate_size": 48, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
}  # fmt: skip


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))


class _WritesAPart(_Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        y[..., :4].mul_(2)
        return y


class _ReadsAnOldView(_Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        view = y.view(y.shape[0], -1)
        y.mul_(2)
        return view.view_as(x)


class _FillsAnEmptyTensor(_Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.new_empty(*x.shape[:-1], 16)
        y[..., 8:12] = self.weight[:4]
        y[..., :8] = x
        y[..., 9] = x[..., 0]
        y[..., 12:] = x[..., :4] + y[..., 8:12]
        y[..., 2:5] *= y[..., 9:10]
        return y


class _WritesItsInput(_Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2) * self.weight


class _ReadsWhatItNeverWrote(_Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.new_empty(*x.shape[:-1], 9)
        y[..., :8] = x * self.weight
        return y


def _traced(kind: type[nn.Module]) -> Body:
    module = kind().to("meta", TRACE_DTYPE)
    x = torch.empty(5, 37, 8, dtype=TRACE_DTYPE, device="meta")
    with torch.no_grad():
        body = BodyTracer({}, {}, Example()).trace("module", module, Recorded((x,), {}))
    assert isinstance(body, Body)
    return body


@pytest.mark.parametrize("kind", [_WritesAPart, _ReadsAnOldView, _FillsAnEmptyTensor])
def test_a_write_in_place_is_a_value(kind: type[nn.Module]) -> None:
    body, module = _traced(kind), kind()
    module.weight.data = torch.randn(8)
    x = torch.randn(2, 5, 8)
    values: dict[Any, Any] = {}
    for node in body.graph.nodes:
        if node.op == "placeholder":
            values[node] = x
        elif node.op == "get_attr":
            values[node] = module.weight
        elif node.op == "call_function":
            assert not node.target._schema.is_mutable
            values[node] = node.target(*fx.map_arg(node.args, values.get), **fx.map_arg(node.kwargs, values.get))
    assert torch.equal(values[body.graph.output_node().args[0]], module(x.clone()))


@pytest.mark.parametrize(
    ("kind", "what"), [(_WritesItsInput, "overwrites its input"), (_ReadsWhatItNeverWrote, "never")]
)
def test_a_write_that_is_no_value_is_refused(kind: type[nn.Module], what: str) -> None:
    with pytest.raises(RewriterError, match=what):
        _traced(kind)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_latent_attention_that_assembles_its_keys_in_place(ranks: int) -> None:
    """Its keys were uninitialised memory once. Heads are split over ranks, what they share is not."""
    config = AutoConfig.for_model(**_LATENT, first_k_dense_replace=2)
    program = applied(trace(config).with_(mesh={"tp": ranks}), ("tensor_parallel", {}))
    assert not program.history[-1].notes
    if ranks > 1:
        split = {name.removeprefix("model.layers.0.self_attn.") for name, p in program.parameters.items() if p.ranges}
        assert {"q_b_proj.weight", "kv_b_proj.weight", "o_proj.weight"} <= split
        assert not split & {"q_a_proj.weight", "kv_a_proj_with_mqa.weight"}
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    zoo.randomize(model, 0)
    for length in (1, 21, 100):
        ids = zoo.batch(2, length)
        with torch.no_grad():
            found = simulate(program, ids, weights=dict(model.named_parameters()))
            assert relative_error(found, model(ids, use_cache=False).logits) <= 1e-5


class _Configured(nn.Module):
    def __init__(self, *attributes: Any, values: tuple[float, ...] = (1.0,)) -> None:
        super().__init__()
        self.sizes, self.activation = attributes
        self.register_buffer("scale", torch.tensor(values))


def test_modules_with_other_settings_trace_apart() -> None:
    base = fingerprint(_Configured([2, 3], torch.relu))
    assert base == fingerprint(_Configured([2, 3], torch.relu))
    assert base != fingerprint(_Configured([2, 4], torch.relu))
    assert base != fingerprint(_Configured([2, 3], torch.tanh))
    assert base != fingerprint(_Configured({"a": 3}, torch.relu))


LONGROPE = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 48}


def test_layers_with_other_buffers_are_no_copies_of_each_other() -> None:
    skeleton = build_skeleton(zoo.config("llama"))
    for index, layer in enumerate(skeleton.layers):
        layer.mlp.register_buffer("slope", torch.empty(2, device="meta"), persistent=False)
        skeleton.buffers[f"{skeleton.layers_path}.{index}.mlp.slope"] = torch.full((2,), float(index // 2))
    with lifted_interfaces(skeleton.model):
        tracer = ModelTracer(skeleton)
        tracer.surroundings()
        kinds = [tracer.kind(index) for index in range(4)]
    assert kinds[0] is kinds[1]
    assert kinds[2] is kinds[3]
    assert kinds[0] is not kinds[2]


class _CallsDropout(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.dropout(x, p=0.25, training=self.training)


def test_dropout_called_as_a_function_is_known_to_the_runtime_module():
    """The runtime module refuses to train where the source would have dropped values."""
    x = torch.empty(5, 37, 8, dtype=torch.bfloat16, device="meta")
    body = BodyTracer({}, {}, Example()).trace("drop", _CallsDropout().eval(), Recorded((x,), {}))
    assert body.dropout == 0.25


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_sum_over_heads_that_several_ranks_hold_counts_each_once(ranks: int) -> None:
    """Key/value heads lie on more than one rank where there are fewer of them than ranks."""
    size = 8
    units = Units(ranks)
    first = units.key_value_heads(4, 2)
    assert first is not None
    labels = torch.arange(first, first + 2).repeat_interleave(size // 2)
    copies = units.copies(labels)
    assert copies == ranks // 2
    x = torch.randn(3, size)
    graph = fx.Graph()
    source = graph.placeholder("x")
    source.meta["val"] = x
    total = graph.call_function(torch.ops.aten.sum.dim_IntList, (source, [-1], True))
    total.meta["val"] = x.sum(-1, keepdim=True)
    graph.output(total)
    ranges = units.ranges(labels)
    reduce_over_ranks(total, {source: (1, ranges)}, ranks, copies)
    local = [torch.cat([x[:, a:b] for a, b in r], 1).sum(-1, keepdim=True) for r in ranges]
    scales = [n.args[1] for n in graph.nodes if n.target is torch.ops.aten.mul.Tensor]
    torch.testing.assert_close(sum(local) * (scales[0] if scales else 1.0), x.sum(-1, keepdim=True))


def test_a_window_of_0_is_known_and_goes_to_no_attention() -> None:
    """Qwen2-MoE without windows makes such a mask beside the causal one that its layers use."""
    nothing = find_mask_spec(lambda b, h, q, kv: (kv <= q) & (kv > q - 0))
    assert nothing == MaskSpec("window", 0)
    assert seen_by(lambda n, spec: ~MaskSpec("causal").visible(torch.arange(n), torch.arange(n)),
                   Static(lambda n, spec: None, frozenset({nothing}))) is None  # fmt: skip

"""Models that once were traced to something else without a word."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from torch import nn
from transformers import AutoConfig

from rewriter.errors import RewriterError
from rewriter.trace import trace
from rewriter.trace.assemble import ModelTracer
from rewriter.trace.bodies import BodyTracer
from rewriter.trace.lifting import Recorded, lifted_interfaces
from rewriter.trace.model import TRACE_DTYPE, build_skeleton

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


class _WritesItsInput(_Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2) * self.weight


@pytest.mark.parametrize("kind", [_WritesAPart, _ReadsAnOldView, _WritesItsInput])
def test_a_write_that_would_be_lost_is_refused(kind: type[nn.Module]) -> None:
    module = kind().to("meta", TRACE_DTYPE)
    x = torch.empty(3, 37, 8, dtype=TRACE_DTYPE, device="meta")
    with torch.no_grad(), pytest.raises(RewriterError, match="overwrites"):
        BodyTracer({}).trace("module", module, Recorded((x,), {}))


def test_latent_attention_that_assembles_its_keys_in_place_is_refused() -> None:
    """Its keys would be uninitialised memory."""
    with pytest.raises(RewriterError, match="overwrites part of a tensor"):
        trace(AutoConfig.for_model(**_LATENT, first_k_dense_replace=2))


def test_rotary_frequencies_that_depend_on_the_length_are_refused() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
    }
    config = zoo.config("llama")
    config.rope_parameters = rope | {"original_max_position_embeddings": 48}
    with pytest.raises(RewriterError):
        trace(config)


def test_layers_with_other_buffers_are_no_copies_of_each_other() -> None:
    skeleton = build_skeleton(zoo.config("llama"))
    for index, layer in enumerate(skeleton.layers):
        layer.mlp.register_buffer("slope", torch.empty(2, device="meta"), persistent=False)
        skeleton.buffers[f"{skeleton.layers_path}.{index}.mlp.slope"] = torch.full((2,), float(index // 2))
    with lifted_interfaces(skeleton.model):
        tracer = ModelTracer(skeleton)
        tracer.outside()
        kinds = [tracer.kind(index) for index in range(4)]
    assert kinds[0] is kinds[1]
    assert kinds[2] is kinds[3]
    assert kinds[0] is not kinds[2]


def test_a_buffer_that_the_checkpoint_stores_is_refused() -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Buffer(torch.zeros(64, device="meta"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.bias

    from rewriter.trace import trace_skeleton

    skeleton = build_skeleton(zoo.config("llama"))
    for index, layer in enumerate(skeleton.layers):
        layer.mlp.down_proj = nn.Sequential(layer.mlp.down_proj, Biased())
        skeleton.buffers[f"{skeleton.layers_path}.{index}.mlp.down_proj.1.bias"] = torch.zeros(64)
    with pytest.raises(RewriterError, match="buffer whose values lie in the checkpoint"):
        trace_skeleton(skeleton)


class _CallsDropout(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.dropout(x, p=0.25, training=self.training)


def test_dropout_called_as_a_function_is_known_to_the_runtime_module():
    """The runtime module refuses to train where the source would have dropped values."""
    x = torch.empty(3, 37, 8, dtype=torch.bfloat16, device="meta")
    body = BodyTracer({}).trace("drop", _CallsDropout().eval(), Recorded((x,), {}))
    assert body.dropout == 0.25

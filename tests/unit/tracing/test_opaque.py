"""Children of a layer that stay the source's own modules: exact in simulation, in emitted files, and under sharding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import emitted
import pytest
import torch
from ladder_reference import ladder_reference
from oracles import relative_error
from programs import PASSES
from random_models import Models
from torch import nn
from transformers import AutoConfig

from rewriter.common.errors import RewriterError
from rewriter.emit.huggingface import emit_huggingface
from rewriter.emit.module import emit_runtime_module
from rewriter.ir import Module, Opaque, Program
from rewriter.ir.residual import residual_blocks
from rewriter.ir.simulate import simulate
from rewriter.tracing import mixer_functions, trace_skeleton
from rewriter.tracing.export import BodyTracer, Example
from rewriter.tracing.interception import Recorded
from rewriter.tracing.meta_model import TRACE_DTYPE, build_skeleton
from rewriter.tracing.opaque import opaque_child, surviving_failures
from rewriter.tracing.wiring import trace_wiring

pytestmark = pytest.mark.tracer


@pytest.fixture(autouse=True, scope="module")
def other_names() -> Iterator[None]:
    """Recurrent mixers as in a version of transformers that has other names for their functions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixer_functions, "_LIFTED", {})
        yield


_TOKENS = dict(vocab_size=256, hidden_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=None)
_SMALL: dict[str, Any] = _TOKENS | dict(
    intermediate_size=112, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2
)
CONFIGS: dict[str, dict[str, Any]] = {
    # Attention and short convolutions, chosen inside one class of layers.
    "lfm2": _SMALL | {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv", "conv"]},
    # A class of layers with attention and one with Mamba; every second layer with experts.
    "jamba": _SMALL | dict(
        model_type="jamba", attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
        num_experts=4, mamba_d_state=8, mamba_dt_rank=8,
    ),
    # Nothing but mixers; the stream is kept in float32, whatever the model's dtype.
    "mamba": _TOKENS | dict(model_type="mamba", state_size=8, num_hidden_layers=3),
}  # fmt: skip
_models = Models(CONFIGS)
model_of, traced, weights = _models.model, _models.traced, _models.weights


def tokens(length: int) -> torch.Tensor:
    return torch.randint(2, 256, (2, length), generator=torch.Generator().manual_seed(length))


@torch.no_grad()
def replayed(program: Program, name: str, ids: torch.Tensor) -> torch.Tensor:
    return simulate(program, ids, weights=weights(name), host=model_of(name))


@pytest.mark.parametrize("length", [1, 21, 100])
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_a_hybrid_replays_and_its_ladder_is_the_reference(name: str, length: int) -> None:
    model, program, ids = model_of(name), traced(name), tokens(length)
    expected = model(input_ids=ids, use_cache=False).logits
    assert relative_error(replayed(program, name, ids), expected) <= 1e-5
    layers = set(range(1, program.source.num_layers))
    with ladder_reference(model, layers):
        rewired = model(input_ids=ids, use_cache=False).logits
    assert relative_error(rewired, expected) >= 1e-2
    ladder = PASSES["ladder"](sorted(layers)).apply(program)
    assert relative_error(replayed(ladder, name, ids), rewired) <= 1e-5


def test_what_stays_is_named_with_its_reason() -> None:
    program = traced("lfm2")
    kept = {path: m for path, m in program.modules.items() if isinstance(m, Opaque)}
    assert list(kept) == [f"model.layers.{i}.conv" for i in (0, 2, 3)]
    assert all("convolution" in m.reason for m in kept.values())
    assert "model.layers.0.conv.in_proj.weight" in program.parameters
    assert [b.kind for b in residual_blocks(program)][:4] == ["mixer", "mlp", "attention", "mlp"]
    assert "the source's own module" in program.text()


@torch.no_grad()
def test_it_is_replicated_under_tensor_parallelism_and_refused_by_the_runtime() -> None:
    program = traced("jamba")
    sharded = PASSES["tensor_parallel"]().apply(program.with_(mesh={"tp": 2}, origin=program))
    assert any("model.layers.0.mamba" in note and "replicated" in note for note in sharded.history[-1].notes)
    expected = model_of("jamba")(input_ids=tokens(21), use_cache=False).logits
    assert relative_error(replayed(sharded, "jamba", tokens(21)), expected) <= 1e-4
    with pytest.raises(RewriterError, match=r"model\.layers\.0\.mamba is JambaMambaMixer"):
        emit_runtime_module(sharded)


def test_a_simulation_needs_the_model_that_was_traced() -> None:
    with pytest.raises(RewriterError, match=r"model\.layers\.0\.conv .*`host=`"):
        simulate(traced("lfm2"), tokens(3), weights=weights("lfm2"))
    with pytest.raises(RewriterError, match="the host model has no"):
        simulate(traced("lfm2"), tokens(3), weights=weights("lfm2"), host=model_of("jamba"))


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_an_emitted_hybrid_generates_as_its_reference(name: str, tmp_path: Path) -> None:
    """Prompts padded on the left, with the model's own cache: masks, caches and positions reach every child."""
    model, program = model_of(name), traced(name)
    layers = set(range(1, program.source.num_layers))
    model.save_pretrained(tmp_path / "source")
    files = emit_huggingface(PASSES["ladder"](sorted(layers)).apply(program))
    emitted.write(files, tmp_path / "source", tmp_path / "out")
    loaded = emitted.load(tmp_path / "out", dtype=torch.float32)
    ids = tokens(12)
    with ladder_reference(model, layers):
        expected = model(input_ids=ids, use_cache=False).logits
    assert relative_error(loaded(input_ids=ids, use_cache=False).logits, expected) <= 1e-5
    ids[0, :4] = 0
    mask = (ids != 0).long()
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    text = loaded.generate(ids, use_cache=True, **options)
    assert torch.equal(text, loaded.generate(ids, use_cache=False, **options))
    with ladder_reference(model, layers):
        assert torch.equal(text, model.generate(ids, use_cache=True, **options))


@torch.no_grad()
def test_a_state_that_is_none_without_a_cache_is_handed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """RWKV's attention returns it, its MLP is given it and returns it, and so does its layer, for the next one."""

    def traced_unless_mixer(self: BodyTracer, path: str, module: nn.Module, *others: Any) -> Module:
        if type(module).__name__ in ("RwkvSelfAttention", "RwkvFeedForward"):
            raise RewriterError("it is not exported here, which would end so after a minute")
        return original(self, path, module, *others)

    original = BodyTracer.trace
    monkeypatch.setattr(BodyTracer, "trace", traced_unless_mixer)
    models = Models({"rwkv": _TOKENS | dict(model_type="rwkv", intermediate_size=112, num_hidden_layers=3)})
    models.model("rwkv").save_pretrained(tmp_path / "source")
    files = emit_huggingface(PASSES["ladder"]([1, 2]).apply(models.traced("rwkv")))
    assert files.modeling is not None
    assert "self.feed_forward(ln2, state=attention_results[1])" in files.modeling
    emitted.write(files, tmp_path / "source", tmp_path / "out")
    loaded = emitted.load(tmp_path / "out", dtype=torch.float32)
    assert type(loaded).__init__.__globals__["difference"]() is None  # also of generated tokens


def test_two_classes_of_layers_have_classes_of_their_own() -> None:
    files = emit_huggingface(PASSES["ladder"]([3]).apply(traced("jamba")))
    kinds = files.config["rewriter_layers"]
    assert kinds == ["standard", "standard_2", "standard_to_ladder", "ladder_last"]
    assert files.modeling is not None
    assert "class StandardToLadderJambaMambaDecoderLayer(JambaMambaDecoderLayer):" in files.modeling
    assert "class LadderLastJambaAttentionDecoderLayer(JambaAttentionDecoderLayer):" in files.modeling


class Fails(nn.Module):
    def forward(self, wide: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError(f"{wide.shape} and {x.shape} have no values")


class FailsInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.mixer, self.norm = nn.Linear(8, 16), Fails(), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.mixer(self.up(x), x))
        return out


def test_a_child_that_fails_is_stood_in_for_in_the_shape_of_the_stream() -> None:
    """So that the norm behind it runs, and is traced."""
    layer = FailsInside().to("meta", TRACE_DTYPE)
    x = torch.empty(2, 3, 8, device="meta", dtype=TRACE_DTYPE)
    with surviving_failures(dict(layer.named_children()), trace_wiring(layer, {}), x.shape) as failures:
        assert layer(x).shape == x.shape
    assert list(failures) == ["mixer"]


@pytest.mark.parametrize("carrier", [{}, [], object()], ids=["dict", "list", "object"])
def test_an_object_that_may_carry_values_between_layers_is_refused(carrier: Any) -> None:
    x = torch.empty(2, 3, 4, device="meta")
    call = Recorded((x,), {"shared": carrier}, x)
    with pytest.raises(RewriterError, match="may carry values from layer to layer"):
        opaque_child("layers.0.mixer", nn.Identity(), call, Example(), "it does not trace")


@pytest.mark.filterwarnings("ignore:The tensor attribute")
def test_a_tensor_that_a_layer_leaves_behind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that stays opaque could read it, and a rewired layer would leave another one."""
    skeleton = build_skeleton(AutoConfig.for_model(**CONFIGS["lfm2"]))
    norm: Any = type(skeleton.layers[0].operator_norm)
    original = norm.forward

    def leaving(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.seen = x
        return original(self, x)  # type: ignore[no-any-return]

    monkeypatch.setattr(norm, "forward", leaving)
    with pytest.raises(RewriterError, match=r"leaves a tensor behind in model\.layers\.0\.\w+\.seen"):
        trace_skeleton(skeleton)

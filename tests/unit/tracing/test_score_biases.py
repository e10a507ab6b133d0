"""Biases that modules compute for every query and key: which are known, and that others are not taken for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rewriter.check.coverage.configs import small_config
from rewriter.check.random_model import build_model
from rewriter.common.errors import RewriterError
from rewriter.ir import Body, Program, ops
from rewriter.tracing import interception, score_biases, trace
from rewriter.tracing.score_biases import gathers_by_distance, makes_dynamic_mask

INKLING: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["hybrid", "hybrid_sliding"]}
DOGE: dict[str, Any] = {"num_hidden_layers": 1}


def attentions(program: Program) -> list[Any]:
    bodies = [m for m in program.modules.values() if isinstance(m, Body)]
    return [n for body in bodies for n in body.graph.nodes if n.target is ops.attention]


def traced(name: str, changes: dict[str, Any]) -> Program:
    layers = changes["num_hidden_layers"]
    kinds = {"mlp_layer_types": ["dense"] * layers} if name == "inkling_text" else {}
    return trace(small_config(name, {**changes, **kinds}))


class Relative(nn.Module):
    """Relative logits, of which tests change one thing at a time."""

    def __init__(self, width: int = 4, extent: int = 6) -> None:
        super().__init__()
        self.profiles = nn.Parameter(torch.empty(width, extent, device="meta"))

    def forward(self, x: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        logits = (x @ self.profiles).transpose(1, 2)
        distance = query_positions[:, None] - key_positions
        return self.taken(logits, distance, self.profiles.shape[1])

    def taken(self, logits: Tensor, distance: Tensor, extent: int) -> Tensor:
        index = distance.clamp(0, extent - 1).expand(*logits.shape[:2], -1, -1)
        return logits.gather(-1, index).masked_fill((distance < 0) | (distance >= extent), 0.0)


class LastBeyond(Relative):
    """Keys that are farther than the last distance take its bias."""

    def taken(self, logits: Tensor, distance: Tensor, extent: int) -> Tensor:
        return super().taken(logits, distance.where(distance < extent, extent - 1), extent)


class OneFarther(Relative):
    """The nearest key is one before the query."""

    def taken(self, logits: Tensor, distance: Tensor, extent: int) -> Tensor:
        return super().taken(logits, distance - 1, extent)


@pytest.mark.parametrize("kind", [LastBeyond, OneFarther])
def test_relative_logits_are_known_by_what_they_compute(kind: type[Relative]) -> None:
    assert gathers_by_distance(Relative())
    assert not gathers_by_distance(kind())


def test_modules_of_models_are_known_and_no_others() -> None:
    inkling, doge = build_model(small_config("inkling_text")), build_model(small_config("doge"))
    before = {name: value.clone() for name, value in inkling.state_dict().items()}
    found = {path for path, module in inkling.named_modules() if gathers_by_distance(module)}
    assert found == {f"model.layers.{i}.self_attn.rel_logits_proj" for i in range(len(inkling.model.layers))}
    assert all(value.equal(before[name]) for name, value in inkling.state_dict().items())  # comparing changes nothing
    masks = {path for path, module in doge.named_modules() if makes_dynamic_mask(module)}
    assert masks == {f"model.layers.{i}.self_attn" for i in range(len(doge.model.layers))}


def test_another_choice_of_keys_is_not_taken_for_a_dynamic_mask() -> None:
    module = build_model(small_config("doge", DOGE)).model.layers[0].self_attn
    kind: Any = type(module)

    def smallest(self: Any, hidden: Tensor, dt: Tensor, count: int, mask: Tensor) -> Tensor:
        return -kind.prepare_dynamic_mask(self, hidden, -dt, count, -mask)

    module.__class__ = type("Other", (kind,), {"prepare_dynamic_mask": smallest})
    assert not makes_dynamic_mask(module)


@pytest.mark.tracer
def test_attention_is_given_what_biases_are_made_of() -> None:
    program = traced("inkling_text", INKLING)
    whole, window = attentions(program)
    assert [n.kwargs["by_distance"].meta["val"].shape[-1] for n in (whole, window)] == [16, 9]
    assert not any(node.target is torch.ops.aten.gather.default for node in whole.graph.nodes)
    # more keys are kept than a call of any traced length has, and fewer
    for kept in (9, 2048):
        (node,) = attentions(traced("doge", {**DOGE, "keep_window_size": kept}))
        assert (node.kwargs["kept"], node.kwargs["mask"]) == (kept, ops.MaskSpec("causal"))
        assert not any(n.target is torch.ops.aten.topk.default for n in node.graph.nodes)


@pytest.mark.tracer
def test_a_term_beside_biases_by_distance_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the last distance it would be missing."""
    known = interception.lifted_attention

    def added(*args: Any, position_bias: Tensor, **options: Any) -> Any:
        return known(*args, position_bias=2 * position_bias + 1, **options)

    monkeypatch.setattr(interception, "lifted_attention", added)
    program = traced("inkling_text", INKLING)
    assert not attentions(program)
    assert "changed by" in str(program.modules["model.layers.0.self_attn"])


@pytest.mark.tracer
def test_a_bias_of_every_query_and_key_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewriter.tracing.relative_logits", lambda model: {})
    monkeypatch.setattr("rewriter.tracing.export.gathers_by_distance", lambda module: False)
    for node in attentions(traced("inkling_text", INKLING)):
        assert "by_distance" not in node.kwargs
        assert node.kwargs["bias"].meta["val"].dim() == 4
        assert node.kwargs["mask"].causal


def test_a_dynamic_mask_without_a_mask_is_refused() -> None:
    with pytest.raises(RewriterError, match="without the mask that transformers' mask functions make"):
        score_biases._recorded(torch.empty(1, 3, 4), torch.empty(1, 2, 3), 2, None)


def test_methods_are_a_model_s_own_again() -> None:
    model = build_model(small_config("doge", DOGE))
    attention = model.model.layers[0].self_attn
    with score_biases.dynamic_masks(model):
        assert attention.prepare_dynamic_mask is score_biases._recorded
    assert "prepare_dynamic_mask" not in vars(attention)

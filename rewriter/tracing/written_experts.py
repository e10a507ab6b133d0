"""Layers of experts that a model computes by a loop of its own, as the operator that transformers' other ones become.

Which operator a loop is, is found by comparing values of small random experts. Experts beyond those that have weights
may hand on their input (LongCat-Flash's "zero experts", arXiv 2509.01322), or add nothing.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rewriter.ir import ops
from rewriter.tracing.interception import is_experts

_WIDTH, _INNER, _TOKENS, _CHOICES = 4, 3, 24, 2  # of the experts that are compared


def written_experts(model: nn.Module) -> dict[nn.Module, Callable[..., torch.Tensor]]:
    """By module, what records it as one operator: forwards of (x [N, C], index [N, K], weight [N, K])."""
    found = {}
    for module in model.modules():
        if _looks_so(module) and (form := _form(module)) is not None:
            found[module] = _recorder(module, *form)
    return found


def _looks_so(module: nn.Module) -> bool:
    if is_experts(module):
        return False
    weights = [module._parameters.get(name) for name in ("gate_up_proj", "down_proj")]
    three = all(isinstance(w, nn.Parameter) and w.dim() == 3 for w in weights)
    return three and len(inspect.signature(type(module).forward).parameters) == 4  # and itself


def _form(module: nn.Module) -> tuple[dict[str, Any], bool] | None:
    """(options of `ops.experts`, whether experts without weights hand on their input); None for another computation."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    every, own = (int(module.get_parameter(name).shape[0]) for name in ("gate_up_proj", "down_proj"))
    up, down = drawn(every, 2 * _INNER, _WIDTH), drawn(own, _WIDTH, _INNER)
    x, weight = drawn(_TOKENS, _WIDTH), drawn(_TOKENS, _CHOICES)
    last = torch.arange(_TOKENS * _CHOICES) % every  # the last experts as well
    index = torch.where(torch.arange(_TOKENS * _CHOICES) % 2 == 0, last, every - 1 - last).reshape(_TOKENS, _CHOICES)
    try:
        expected = torch.func.functional_call(module, {"gate_up_proj": up, "down_proj": down}, (x, index, weight))
    except Exception:  # a model's own code, on values of ours
        return None
    for act in ops.ACTIVATIONS:
        routed = ops.experts(x, index, weight, up[:own], down, act=act)
        for hands_on in (False, True):
            total = routed + _handed_on(x, index, weight, own) if hands_on else routed
            if total.shape == expected.shape and torch.allclose(total, expected, rtol=1e-6, atol=1e-6):
                return {"act": act}, hands_on
    return None


def _handed_on(x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor, own: int) -> torch.Tensor:
    """The sum that experts from number `own` on add: their input, by its weight."""
    return (x * (weight * (index >= own)).sum(-1, keepdim=True)).to(x.dtype)


def _recorder(module: nn.Module, options: dict[str, Any], hands_on: bool) -> Callable[..., torch.Tensor]:
    text = json.dumps(options)

    def forward(x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        up, down = module.get_parameter("gate_up_proj"), module.get_parameter("down_proj")
        routed: torch.Tensor = torch.ops.rewriter_trace.experts(x, index, weight, up, down, None, None, text)
        return routed + _handed_on(x, index, weight, int(down.shape[0])) if hands_on else routed

    return forward

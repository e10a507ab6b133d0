"""Experts of transformers' ExpertsInterface, recorded as one operator; how they gate is found by evaluating them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from rewriter.common.errors import RewriterError
from rewriter.ir.ops import ACTIVATIONS, gated
from rewriter.tracing.model_errors import first_line

_library = torch.library.Library("rewriter_trace", "FRAGMENT")
_library.define(
    "experts(Tensor x, Tensor index, Tensor weight, Tensor up, Tensor down, Tensor? up_bias, Tensor? down_bias, "
    "str options) -> Tensor"
)


@torch.library.register_fake("rewriter_trace::experts", lib=_library)
def _experts(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x)


def is_experts(module: nn.Module) -> bool:
    """True if transformers lets an experts function compute `module`."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate") and hasattr(module, "down_proj")


def lifted_experts(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts function of transformers' ExpertsInterface. Raises RewriterError when it cannot be represented."""
    if getattr(module, "has_post_expert_norm", False):
        raise RewriterError(f"{type(module).__name__}: experts with a norm of their own are not supported yet")
    if module not in _options:  # the first call is outside of any export: a module runs on meta before it is exported
        _options[module] = {**gate_of(module), **({"transposed": True} if module.is_transposed else {})}
    up = "gate_up_proj" if module.has_gate else "up_proj"
    biases = (getattr(module, f"{up}_bias"), module.down_proj_bias) if module.has_bias else (None, None)
    return torch.ops.rewriter_trace.experts(
        hidden_states, top_k_index, top_k_weights, getattr(module, up), module.down_proj, *biases,
        json.dumps(_options[module]),
    )  # fmt: skip


_options: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()


def gate_of(module: nn.Module) -> dict[str, Any]:
    """The options of `ops.gated`, other than their defaults, that compute what the module does between projections.

    Its numbers (a limit, a slope) are attributes of the module; which of them plays which part is found by comparing
    values. Raises RewriterError when none agree.
    """
    numbers = sorted({float(v) for v in vars(module).values() if isinstance(v, float)})
    generator = torch.Generator(device="cpu").manual_seed(0)
    scale = torch.tensor([0.3, 1.0, 3.0, 10.0, 40.0], dtype=torch.float64, device="cpu")[:, None, None]
    sample = scale * torch.randn(5, 64, 32, generator=generator, dtype=torch.float64, device="cpu")
    try:
        expected = module._apply_gate(sample) if module.has_gate else module.act_fn(sample)  # type: ignore[operator]
    except Exception as error:  # a model's own code, on values and dtypes of ours
        raise RewriterError(
            f"{type(module).__name__}: what its experts do between their projections cannot be evaluated "
            f"({first_line(error)})"
        ) from error
    # modules that compute in float32 whatever they are given are compared as exactly as that allows
    in_float32 = torch.equal(expected.float().to(expected.dtype), expected) or expected.dtype == torch.float32
    tolerance = float(expected.abs().max()) * (1e-6 if in_float32 else 1e-9)
    for options in _candidates(bool(module.has_gate), numbers):
        computed = gated(sample, **options)
        if computed.shape == expected.shape and (computed - expected).abs().max() <= tolerance:
            return options
    raise RewriterError(
        f"{type(module).__name__}: what its experts do between their projections is none of the forms that are known "
        f"(activations {', '.join(sorted(ACTIVATIONS))}; a limit; a slope; an offset)"
    )


def _candidates(has_gate: bool, numbers: list[float]) -> Iterator[dict[str, Any]]:
    """Options of `ops.gated`, simple ones first."""
    if not has_gate:
        yield from ({"act": act, "layout": "ungated"} for act in ACTIVATIONS)
        return
    for limit, slope, offset, layout, act in itertools.product(
        (None, *(n for n in numbers if n > 0)),
        (1.0, *numbers),
        (0.0, 1.0),
        ("concatenated", "interleaved"),
        ACTIVATIONS,
    ):
        if slope == 1.0 or act == "silu":
            options = {"act": act, "layout": layout, "limit": limit, "slope": slope, "offset": offset}
            defaults = {"layout": "concatenated", "limit": None, "slope": 1.0, "offset": 0.0}
            yield {name: value for name, value in options.items() if name == "act" or value != defaults[name]}

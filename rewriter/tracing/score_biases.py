"""Biases of attention scores that modules compute for every query and key, traced as what they are made of.

As they stand, they are right for one whole sequence alone: with a cache there are more keys than tokens of the call.

- Relative logits: a bias per query and distance, of which every key takes the one of its distance (Shaw et al. 2018,
  arXiv 1803.02155). The module is traced as what it takes from, and attention takes it: its option `by_distance`.
- Dynamic masks (Doge, arXiv 2508.02124): a bias per key, of which a query sees the keys with the largest. The method is
  recorded as an operator, of which `attention_matching` makes the options `key_bias` and `kept`.

That a module or method computes this is found by comparing values.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from rewriter.common.errors import RewriterError
from rewriter.ir import args_of, ops
from rewriter.ir.op_semantics import function_of, is_movement, kind_of
from rewriter.tracing.attention_scores import shape_of

_library = torch.library.Library("rewriter_trace", "FRAGMENT")
_library.define("key_mask(Tensor key_bias, Tensor mask, int kept) -> Tensor")


@torch.library.register_fake("rewriter_trace::key_mask", lib=_library)
def _key_mask(key_bias: Tensor, mask: Tensor, kept: int) -> Tensor:
    batch, kv_heads, length = key_bias.shape
    return key_bias.new_empty(batch, kv_heads, mask.shape[2], length)


def is_key_mask(node: fx.Node) -> bool:
    """True for what records a dynamic mask: (bias [B, K, T], additive mask [B, 1, S, T], the number of keys kept)."""
    return node.target is torch.ops.rewriter_trace.key_mask.default


# --- by distance -----------------------------------------------------------------------------------------------------


def relative_logits(model: nn.Module) -> dict[nn.Module, Callable[..., Tensor]]:
    """By module of `model` that takes biases by distance, the forward that gives what it takes from, [B, H, S, R]."""
    return {module: _taken_from(module) for module in model.modules() if gathers_by_distance(module)}


def gathers_by_distance(module: nn.Module) -> bool:
    """True if a module computes `ops.at_distance` of x [B, S, H, D] times its only parameter [D, R], transposed, for
    positions of queries and keys."""
    parameters = [*module.named_parameters()]
    arguments = inspect.signature(type(module).forward).parameters
    if len(parameters) != 1 or parameters[0][1].dim() != 2 or len(arguments) != 4 or [*module.buffers()]:  # and itself
        return False
    name, (width, extent) = parameters[0][0], parameters[0][1].shape
    draw = torch.Generator().manual_seed(0)
    profiles = torch.randn(width, extent, generator=draw, dtype=torch.float64)
    x = torch.randn(2, 5, 3, width, generator=draw, dtype=torch.float64)
    s = torch.tensor([0, 1, extent - 1, extent, 2 * extent + 3])
    t = torch.tensor([0, 1, 2, extent, extent + 3, 2 * extent + 2])
    own = copy.copy(module)
    vars(own).pop("forward", None)  # that of its class
    try:
        taken = torch.func.functional_call(own, {name: profiles}, (x, s, t))
    except Exception:  # a model's own code, on values of ours
        return False
    expected = ops.at_distance((x @ profiles).transpose(1, 2), s, t)
    return taken.shape == expected.shape and torch.allclose(taken, expected, rtol=1e-6, atol=1e-6)


def _taken_from(module: nn.Module) -> Callable[..., Tensor]:
    ((name, _),) = module.named_parameters()

    def forward(x: Tensor, *_: Any) -> Tensor:
        return (x @ module.get_parameter(name)).transpose(1, 2)

    return forward


def require_scaled(by_distance: fx.Node) -> None:
    """Raise RewriterError unless what a module takes from reaches attention times factors alone: what is added would be
    missing beyond the last distance."""
    node, shape = by_distance, shape_of(by_distance)
    while kind_of(node) == "cast" or function_of(node) in ("mul", "div"):
        node = next(n for n in node.all_input_nodes if shape_of(n) == shape)
    if not is_movement(node) or kind_of(args_of(node)[0]) != "product":
        raise RewriterError(
            f"what its attention adds to scores by distance is changed by {node.target} first (expected: factors alone)"
        )


# --- by key ----------------------------------------------------------------------------------------------------------

_DYNAMIC_MASK = "prepare_dynamic_mask"


@contextlib.contextmanager
def dynamic_masks(model: nn.Module) -> Iterator[None]:
    """Within it, methods of modules of `model` that make dynamic masks record them. A method that computes something
    else stays as it is."""
    modules = [m for m in model.modules() if makes_dynamic_mask(m)]
    try:
        for module in modules:
            setattr(module, _DYNAMIC_MASK, _recorded)
        yield
    finally:
        for module in modules:
            vars(module).pop(_DYNAMIC_MASK, None)


def makes_dynamic_mask(module: Any) -> bool:
    """True if a module has the method and it computes biases [B, K, T] for every query, the lowest number at all but
    the keys that `ops.largest` names among those that the mask shows."""
    if not hasattr(type(module), _DYNAMIC_MASK):
        return False
    kept, length = 4, 11
    draw = torch.Generator().manual_seed(0)
    key_bias = torch.rand(2, 3, length, generator=draw, dtype=torch.float64)
    x, mask = key_bias.new_zeros(2, length, 4), ops.additive_mask(key_bias.new_zeros(2, length), mask=_CAUSAL)
    seen = mask == 0
    lowest = torch.finfo(x.dtype).min
    for count in (kept, length):
        try:
            made = getattr(type(module), _DYNAMIC_MASK)(module, x, key_bias, count, mask)
        except Exception:  # a model's own code, on values of ours
            return False
        shown = seen & ops.largest(key_bias, seen, count)
        if not made.equal(key_bias[:, :, None].where(shown, lowest)):
            return False
    return True


_CAUSAL = ops.MaskSpec("causal")


def _recorded(hidden_states: Tensor, dt_states: Tensor, keep_window_size: int, attention_mask: Any = None) -> Tensor:
    if not isinstance(attention_mask, Tensor):
        raise RewriterError("a dynamic mask is made without the mask that transformers' mask functions make")
    mask: Tensor = torch.ops.rewriter_trace.key_mask(dt_states, attention_mask, keep_window_size)
    return mask

"""Lightning attention (arXiv 2401.04658), which a module computes block by block in a loop of its own, as one operator.

Its state decays by a constant of each head, exp(−slope), and keys are written as they are: the delta rule without its
delta. That a module computes this is found by comparing values, of one of few small heads.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rewriter.ir import ops

_HEADS, _WIDTH, _INPUTS, _BLOCK, _TOKENS = 2, 4, 6, 5, 13  # of the module that is compared: two blocks and a part
_OPTIONS: dict[str, Any] = {"l2norm": False, "scale": 1.0, "delta": False}
_DECAYS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")

Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def written_mixers(model: nn.Module) -> dict[nn.Module, Callable[..., tuple[Tensor, None]]]:
    """By module, what records it: forwards of the hidden states, whose other arguments have no effect on one whole
    sequence without padding."""
    return {module: _recorder(module) for module in model.modules() if computes_lightning_attention(module)}


def computes_lightning_attention(module: nn.Module) -> bool:
    """True if a module computes what `_composed` does, of its own weights and slopes."""
    shapes = {
        "qkv_proj.weight": (3 * _HEADS * _WIDTH, _INPUTS),
        "output_gate.weight": (_HEADS * _WIDTH, _INPUTS),
        "norm.weight": (_HEADS * _WIDTH,),
        "out_proj.weight": (_INPUTS, _HEADS * _WIDTH),
    }
    buffers = {name for name, _ in module.named_buffers()}
    if buffers != set(_DECAYS) or {name for name, _ in module.named_parameters()} != shapes.keys():
        return False
    draw = torch.Generator().manual_seed(0)
    tensors = {n: torch.randn(*shape, generator=draw, dtype=torch.float64) for n, shape in shapes.items()}
    x = torch.randn(2, _TOKENS, _INPUTS, generator=draw, dtype=torch.float64)
    slopes = torch.rand(_HEADS, 1, 1, generator=draw, dtype=torch.float64)
    small: Any = copy.copy(module)
    small.num_attention_heads, small.head_dim, small.block_size = _HEADS, _WIDTH, _BLOCK
    try:
        tensors |= dict(zip(_DECAYS, (slopes, *small.decay_factors(slopes)), strict=True))
        expected = torch.func.functional_call(small, tensors, (x, None, None))[0]
        composed = torch.func.functional_call(_Composed(small), {f"of.{n}": t for n, t in tensors.items()}, (x,))
    except Exception:  # a model's own code, on values of ours
        return False
    return expected.shape == composed.shape and torch.allclose(composed, expected, rtol=1e-5, atol=1e-5)


class _Composed(nn.Module):
    """The module `of`, computed by the operator's specification."""

    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        return _composed(
            self.of, x, lambda q, k, v, g, beta: ops.delta_rule(q, k, v, g, beta, None, slot=0, **_OPTIONS)
        )


def _composed(module: Any, x: Tensor, rule: Rule) -> Tensor:
    """`module` of x [B, S, inputs], with `rule` for its recurrence."""
    heads, width = module.num_attention_heads, module.head_dim
    q, k, v = module.act_fn(module.qkv_proj(x)).view(*x.shape[:2], heads, 3 * width).split(width, -1)
    g = -module.slope_rate.view(heads).expand(v.shape[:3])
    o = rule(q, k, v, g, torch.ones_like(g)).flatten(2)
    out: Tensor = module.out_proj(torch.sigmoid(module.output_gate(x)) * module.norm(o))
    return out


def _recorder(module: nn.Module) -> Callable[..., tuple[Tensor, None]]:
    options = json.dumps(_OPTIONS)

    def forward(hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return _composed(module, hidden_states, lambda *x: torch.ops.rewriter_trace.delta_rule(*x, options)), None

    return forward

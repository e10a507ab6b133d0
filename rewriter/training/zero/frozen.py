"""Frozen weights kept quantized: the base of a LoRA model in a half or a quarter of its bytes.

A weight that is not trained is read only, so it can be a payload (`rewriter.kernels`): sharded, gathered and saved for
backward as bytes, dequantized in forward where it is used and once more in backward. ZeRO++ (`zero-plus-plus.md`,
section 3.1, "Additional benefits") quantizes such weights for the gather alone; here nothing else of them is left.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from rewriter.common.errors import RewriterError
from rewriter.kernels import Format, dequantize_rows, parse_format, quantize_rows
from rewriter.runtime.quantized.schedules import known_format


@dataclass(frozen=True)
class FrozenWeights:
    """The report of `quantize_frozen`. `weights`: by name, (bytes before, bytes after). `kept`: frozen matrices that
    stay as they are, with the reason."""

    weights: dict[str, tuple[int, int]]
    kept: dict[str, str]

    @property
    def before(self) -> int:
        """Bytes of the weights before they were quantized."""
        return sum(before for before, _ in self.weights.values())

    @property
    def after(self) -> int:
        """Bytes of the payloads, scales included."""
        return sum(after for _, after in self.weights.values())


class QuantizedWeight(RewriterError, AttributeError):
    """A weight was read that is a payload now. `hasattr` says False."""


class _Linear(torch.autograd.Function):
    """x wᵀ + bias for the w of a payload. The payload is saved, not w, and gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, payload_RB: Tensor, bias: Tensor | None, format: Format, n: int) -> Tensor:
        ctx.format, ctx.n = format, n
        ctx.save_for_backward(payload_RB)
        return F.linear(x, dequantize_rows(payload_RB, format, n, x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        (payload_RB,) = ctx.saved_tensors
        dx = dbias = None
        if ctx.needs_input_grad[0]:
            dx = gradient @ dequantize_rows(payload_RB, ctx.format, ctx.n, gradient.dtype)
        if ctx.needs_input_grad[2]:
            dbias = gradient.reshape(-1, gradient.shape[-1]).sum(0)
        return dx, None, dbias, None, None


class FrozenLinear(nn.Module):
    """A linear layer whose weight is `payload`, uint8 [out_features, bytes of a row]; it computes in its input's dtype.

    Rows are quantized each by itself, so that FSDP2 may shard them anywhere. The bias stays as it is.
    """

    def __init__(self, linear: nn.Linear, format: Format) -> None:
        super().__init__()
        self.in_features, self.out_features, self.format = linear.in_features, linear.out_features, format
        self.dtype = linear.weight.dtype
        payload_RB = quantize_rows(linear.weight.detach(), format)
        self.payload = nn.Parameter(payload_RB, requires_grad=False)
        self.bias = linear.bias

    def __getattr__(self, name: str) -> Any:
        """There is no `weight`: a copy would take changes, such as an adapter merged into it, and lose them."""
        if name == "weight":
            raise QuantizedWeight(
                f"weight: this layer keeps it as {self.format}. Read it with dequantized(), and merge adapters into a "
                "model that was not given to quantize_frozen"
            )
        return super().__getattr__(name)

    def dequantized(self) -> Tensor:
        """The weight that this layer computes with, [out_features, in_features], in the dtype that it was given."""
        payload = self.payload
        whole = payload.full_tensor() if isinstance(payload, DTensor) else payload
        return dequantize_rows(whole.detach(), self.format, self.in_features, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., out_features] of x [..., in_features]."""
        device = x.device.type
        if torch.is_autocast_enabled(device):  # as it casts the arguments of F.linear
            x = x.to(torch.get_autocast_dtype(device))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        y: Tensor = _Linear.apply(x, self.payload, bias, self.format, self.in_features)
        return y

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"format={self.format}"
        )


def quantize_frozen(model: nn.Module, format: str, *, min_elements: int = 1 << 16) -> FrozenWeights:
    """Keep the frozen weights of `model`'s linear layers as payloads of `format`, in place; says what was done.

    Those of `nn.Linear` with `requires_grad` False and at least `min_elements` elements, as in the base layers of
    peft's LoRA. The layers compute with the dequantized weight in their input's dtype; gradients flow to their input.
    Call it after adapters were added and weights loaded, and before `fully_shard`, which then shards and gathers the
    bytes. Weights that several modules share, and layers derived from `nn.Linear` that compute in another way,
    stay as they are.

    `fully_shard` takes such layers in torch 2.13; in 2.11 it refuses parameters of integers, frozen or not ("Only
    Tensors of floating point and complex dtype can require gradients", pytorch issue 177844).

    Raises RewriterError for a format that does not exist, a model that is sharded already, and one with nothing frozen
    to quantize.
    """
    parsed = known_format(format, "quantize_frozen", parse_format)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise RewriterError(
                f"quantize_frozen: {name} is sharded already. Call it before fully_shard or shard_parameters"
            )
    uses = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    weights: dict[str, tuple[int, int]] = {}
    kept: dict[str, str] = {}
    made: dict[nn.Linear, FrozenLinear] = {}  # a layer may be a child of several modules
    for name, module in list(model.named_modules()):
        for child_name, child in list(module._modules.items()):
            if not isinstance(child, nn.Linear) or child.weight.requires_grad:
                continue
            path = f"{name}.{child_name}.weight".removeprefix(".")
            reason = _reason(child, uses, min_elements)
            if reason is not None:
                kept[path] = reason
                continue
            if child not in made:
                made[child] = FrozenLinear(child, parsed).train(child.training)
                weights[path] = child.weight.nbytes, made[child].payload.nbytes
            setattr(module, child_name, made[child])
    if not weights:
        why = "; ".join(f"{path}: {reason}" for path, reason in list(kept.items())[:3])
        raise RewriterError(
            f"quantize_frozen: {type(model).__name__} has no frozen weight of a linear layer to quantize"
            f"{f' ({why})' if why else ''}. Freeze what is not trained first: parameter.requires_grad_(False)"
        )
    return FrozenWeights(weights, kept)


def _reason(linear: nn.Linear, uses: Counter[int], min_elements: int) -> str | None:
    """The reason for which the weight of a frozen layer stays as it is; None if it need not."""
    if type(linear) is not nn.Linear:
        return f"a {type(linear).__name__} computes in a way of its own"
    if linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks:
        return "hooks of its layer would be lost"
    if uses[id(linear.weight)] > 1:
        return "other modules share it"
    if linear.weight.numel() < min_elements:
        return f"{linear.weight.numel():,} elements are fewer than {min_elements:,}"
    return None

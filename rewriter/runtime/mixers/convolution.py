"""Mixers whose state is their last few inputs: a causal convolution of each channel, and tokens behind earlier ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rewriter.ir.activations import ACTIVATIONS
from rewriter.kernels import accumulation_dtype
from rewriter.runtime.context import Context
from rewriter.runtime.mixers.state import state_after, state_before, without_padding


def causal_conv(
    x_BCS: Tensor, weight_CK: Tensor, bias_C: Tensor | None, ctx: Context, *, slot: int, activation: str | None = None
) -> Tensor:
    """act(bias + Σ_k weight[c, k] · x[b, c, t − K + 1 + k]) in the weight's dtype; [B, C, S] in x's dtype.

    Padding counts as 0, as does what was before the first token. State: [B, C, K − 1], in the cache's dtype.
    """
    whole = _behind_earlier(x_BCS, ctx, slot, weight_CK.shape[1] - 1, "causal_conv")
    last, whole = whole[:, :, x_BCS.shape[2] :], whole.to(weight_CK.dtype)
    if x_BCS.shape[2] == 1:
        y = _one_token(whole, weight_CK, bias_C)
    else:
        y = F.conv1d(whole, weight_CK[:, None], bias_C, groups=weight_CK.shape[0])
    state_after(ctx, slot, last, y)
    return (y if activation is None else ACTIVATIONS[activation](y)).to(x_BCS.dtype)


def preceded(x_BCS: Tensor, ctx: Context, *, slot: int, count: int) -> Tensor:
    """`x` behind the last `count` values of earlier tokens, [B, C, count + S].

    Padding counts as 0, as does what was before the first token. State: [B, C, count], in the cache's dtype.
    """
    whole = _behind_earlier(x_BCS, ctx, slot, count, "preceded")
    state_after(ctx, slot, whole[:, :, x_BCS.shape[2] :], whole)
    return whole


def _behind_earlier(x_BCS: Tensor, ctx: Context, slot: int, count: int, name: str) -> Tensor:
    """[B, C, count + S], with zeros at padding."""
    before_BCL = state_before(ctx, slot, name)
    x = without_padding(x_BCS, ctx, 2)
    return F.pad(x, (count, 0)) if before_BCL is None else torch.cat([before_BCL.to(x.dtype), x], 2)


def _one_token(x_BCK: Tensor, weight_CK: Tensor, bias_C: Tensor | None) -> Tensor:
    """[B, C, 1], by operators that Inductor fuses."""
    wide = accumulation_dtype(weight_CK.dtype)
    y_BC = (x_BCK.to(wide) * weight_CK.to(wide)).sum(2)
    return (y_BC if bias_C is None else y_BC + bias_C.to(wide)).to(weight_CK.dtype).unsqueeze(2)

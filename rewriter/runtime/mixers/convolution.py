"""Causal convolution of each channel, whose state is the last K − 1 inputs."""

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
    before_BCL = state_before(ctx, slot, "causal_conv")
    x = without_padding(x_BCS, ctx, 2)
    taps = weight_CK.shape[1]
    whole = F.pad(x, (taps - 1, 0)) if before_BCL is None else torch.cat([before_BCL.to(x.dtype), x], 2)
    last, whole = whole[:, :, x.shape[2] :], whole.to(weight_CK.dtype)
    if x.shape[2] == 1:
        y = _one_token(whole, weight_CK, bias_C)
    else:
        y = F.conv1d(whole, weight_CK[:, None], bias_C, groups=weight_CK.shape[0])
    state_after(ctx, slot, last, y)
    return (y if activation is None else ACTIVATIONS[activation](y)).to(x_BCS.dtype)


def _one_token(x_BCK: Tensor, weight_CK: Tensor, bias_C: Tensor | None) -> Tensor:
    """[B, C, 1], by operators that Inductor fuses."""
    wide = accumulation_dtype(weight_CK.dtype)
    y_BC = (x_BCK.to(wide) * weight_CK.to(wide)).sum(2)
    return (y_BC if bias_C is None else y_BC + bias_C.to(wide)).to(weight_CK.dtype).unsqueeze(2)

"""Mixers that carry a state from token to token: the plain recurrences, token by token, as specification.

All begin from a state of zeros and see full sequences; `ctx` and `slot` are ignored, as in `ops.attention`. They
compute in fp32 (fp64 of fp64) and return x's, or v's, dtype; the convolution computes in its weight's, and `preceded`
only moves values.

Shape suffixes: B batch, S tokens, C channels, K taps of a kernel, H heads, G key heads or groups, D size of a key head,
E of a value head, P of a head, N of a channel's state. Head h reads key head, or group, h // (H / G).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from rewriter.ir.activations import ACTIVATIONS
from rewriter.kernels import accumulation_dtype

L2_EPSILON = 1e-6  # flash-linear-attention's


def causal_conv(
    x_BCS: torch.Tensor,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    ctx: Any,
    *,
    slot: int | str,
    activation: str | None = None,
) -> torch.Tensor:
    """act(bias[c] + Σ_k weight[c, k] · x[b, c, t − K + 1 + k]), with 0 before the first token; [B, C, S].

    `activation`: a name of `ACTIVATIONS`, or None. (causal-conv1d's causal_conv1d_fn.)
    """
    del ctx, slot
    taps = weight_CK.shape[1]
    x = F.pad(x_BCS.to(weight_CK.dtype), (taps - 1, 0))
    y = F.conv1d(x, weight_CK[:, None], bias_C, groups=weight_CK.shape[0])
    return (y if activation is None else ACTIVATIONS[activation](y)).to(x_BCS.dtype)


def preceded(x_BCS: torch.Tensor, ctx: Any, *, slot: int | str, count: int) -> torch.Tensor:
    """`x` behind the last `count` values of earlier tokens, [B, C, count + S]: here behind zeros.

    What a model computes of it over windows of count + 1 tokens (convolutions without padding, pieces that leave out
    tokens at one end) is of each token and those before it, however a sequence is given in parts.
    """
    del ctx, slot
    return F.pad(x_BCS, (count, 0))


def delta_rule(
    q_BSGD: torch.Tensor,
    k_BSGD: torch.Tensor,
    v_BSHE: torch.Tensor,
    g: torch.Tensor,
    beta_BSH: torch.Tensor,
    ctx: Any,
    *,
    slot: int | str,
    l2norm: bool,
    scale: float,
    delta: bool = True,
) -> torch.Tensor:
    """h ← exp(g) h;  h ← h + k ⊗ β (v − hᵀk);  o = scale · hᵀq, with a state h [D, E] per head; o_BSHE.

    `g` [B, S, H], or [B, S, H, D] for a decay of each row of h (Kimi delta attention), is at most 0. `l2norm`: q and k
    are divided by their length first. Without `delta` nothing is read before it is written, h ← h + k ⊗ β v (lightning
    attention). (Gated delta networks, arXiv 2412.06464; Kimi linear, arXiv 2510.26692.)
    """
    del ctx, slot
    wide = accumulation_dtype(v_BSHE.dtype)
    heads = v_BSHE.shape[2] // k_BSGD.shape[2]
    q, k, v, g, beta = (x.to(wide) for x in (q_BSGD, k_BSGD, v_BSHE, g, beta_BSH))
    if l2norm:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPSILON) for x in (q, k))
    q_BSHD, k_BSHD = (x.repeat_interleave(heads, 2) for x in (q, k))
    decay = (g if g.dim() == 4 else g[..., None]).exp()[..., None]
    h_BHDE = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    out = []
    for t in range(v.shape[1]):
        h_BHDE = decay[:, t] * h_BHDE
        write_BHE = v[:, t] - _read(h_BHDE, k_BSHD[:, t]) if delta else v[:, t]
        h_BHDE = h_BHDE + k_BSHD[:, t, :, :, None] * (beta[:, t, :, None] * write_BHE)[:, :, None]
        out.append(scale * _read(h_BHDE, q_BSHD[:, t]))
    return torch.stack(out, 1).to(v_BSHE.dtype)


def _read(h_BHDE: torch.Tensor, k_BHD: torch.Tensor) -> torch.Tensor:
    """hᵀk [B, H, E]."""
    return (h_BHDE * k_BHD[..., None]).sum(-2)


def state_space(
    x_BSHP: torch.Tensor,
    dt_BSH: torch.Tensor,
    A_H: torch.Tensor,
    B_BSGN: torch.Tensor,
    C_BSGN: torch.Tensor,
    D_H: torch.Tensor | None,
    dt_bias_H: torch.Tensor | None,
    ctx: Any,
    *,
    slot: int | str,
    softplus: bool,
    limit: tuple[float, float],
) -> torch.Tensor:
    """Δ = clamp(softplus(dt + dt_bias), *limit);  h ← exp(Δ A) h + Δ x ⊗ B;  y = h C + D x, with a state h [P, N] per
    head; y_BSHP.

    `A_H` is below 0. Without `softplus`, Δ = clamp(dt + dt_bias, *limit). (Mamba 2, arXiv 2405.21060.)
    """
    del ctx, slot
    wide = accumulation_dtype(x_BSHP.dtype)
    x = x_BSHP.to(wide)
    heads = x.shape[2] // B_BSGN.shape[2]
    B_BSHN, C_BSHN = (m.to(wide).repeat_interleave(heads, 2) for m in (B_BSGN, C_BSGN))
    dt = dt_BSH.to(wide)
    if dt_bias_H is not None:
        dt = dt + dt_bias_H.to(wide)
    dt = (F.softplus(dt) if softplus else dt).clamp(*limit)
    decay = (dt * A_H.to(wide)).exp()
    h_BHPN = x.new_zeros(*x.shape[:1], *x.shape[2:], B_BSHN.shape[-1])
    out = []
    for t in range(x.shape[1]):
        write_BHP = dt[:, t, :, None] * x[:, t]
        h_BHPN = decay[:, t, :, None, None] * h_BHPN + write_BHP[..., None] * B_BSHN[:, t, :, None]
        out.append((h_BHPN * C_BSHN[:, t, :, None]).sum(-1))
    y = torch.stack(out, 1)
    return (y if D_H is None else y + D_H.to(wide)[:, None] * x).to(x_BSHP.dtype)


def selective_scan(
    x_BCS: torch.Tensor,
    dt_BCS: torch.Tensor,
    A_CN: torch.Tensor,
    B_BNS: torch.Tensor,
    C_BNS: torch.Tensor,
    D_C: torch.Tensor | None,
    z_BCS: torch.Tensor | None,
    dt_bias_C: torch.Tensor | None,
    ctx: Any,
    *,
    slot: int | str,
    softplus: bool,
) -> torch.Tensor:
    """Δ = softplus(dt + dt_bias);  h ← exp(Δ A) h + Δ x B;  y = (h · C + D x) · silu(z), with a state h [N] per
    channel; y_BCS.

    `A_CN` is below 0. Without `softplus`, Δ = dt + dt_bias; without `z_BCS`, nothing is gated. (Mamba, arXiv
    2312.00752.)
    """
    del ctx, slot
    wide = accumulation_dtype(x_BCS.dtype)
    x, A, B, C = (m.to(wide) for m in (x_BCS, A_CN, B_BNS, C_BNS))
    dt = dt_BCS.to(wide)
    if dt_bias_C is not None:
        dt = dt + dt_bias_C.to(wide)[:, None]
    dt = F.softplus(dt) if softplus else dt
    h_BCN = x.new_zeros(*x.shape[:2], A.shape[1])
    out = []
    for t in range(x.shape[2]):
        write_BC = dt[..., t] * x[..., t]
        h_BCN = (dt[..., t, None] * A).exp() * h_BCN + write_BC[..., None] * B[:, None, :, t]
        out.append((h_BCN * C[:, None, :, t]).sum(-1))
    y = torch.stack(out, -1)
    y = y if D_C is None else y + D_C.to(wide)[:, None] * x
    return (y if z_BCS is None else y * F.silu(z_BCS.to(wide))).to(x_BCS.dtype)


def linear_scan(x_BSC: torch.Tensor, log_decay_BSC: torch.Tensor, ctx: Any, *, slot: int | str) -> torch.Tensor:
    """h ← exp(log_decay) h + x per channel; every h, [B, S, C].

    `log_decay_BSC` is at most 0. (The recurrence of RG-LRU, arXiv 2402.19427, whose input x is scaled by its caller.)
    """
    del ctx, slot
    wide = accumulation_dtype(x_BSC.dtype)
    x, decay = x_BSC.to(wide), log_decay_BSC.to(wide).exp()
    h_BC = torch.zeros_like(x[:, 0])
    out = []
    for t in range(x.shape[1]):
        h_BC = decay[:, t] * h_BC + x[:, t]
        out.append(h_BC)
    return torch.stack(out, 1).to(x_BSC.dtype)

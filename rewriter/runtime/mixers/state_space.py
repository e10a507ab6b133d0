"""Mamba 2: a matrix per head with one decay per token.

In a chunk (arXiv 2405.21060, section 6), with c the sum of Δ A from its first token on and h [P, N] the state before,

    y[i] = Σ_{j ≤ i} (C[i] · B[j]) exp(c[i] − c[j]) Δ[j] x[j] + exp(c[i]) h C[i] + D x[i]
    h ← exp(c[L]) h + Σ_j exp(c[L] − c[j]) Δ[j] x[j] ⊗ B[j]
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rewriter.kernels import accumulation_dtype
from rewriter.runtime.compiled import in_memory
from rewriter.runtime.context import Context
from rewriter.runtime.mixers import kernels
from rewriter.runtime.mixers.chunks import chunked, decay_matrix
from rewriter.runtime.mixers.sequence_operator import sequence_operator
from rewriter.runtime.mixers.state import state_after, state_before, without_padding

_PIECE = 1024  # tokens at once


def state_space(
    x_BSHP: Tensor,
    dt_BSH: Tensor,
    A_H: Tensor,
    B_BSGN: Tensor,
    C_BSGN: Tensor,
    D_H: Tensor | None,
    dt_bias_H: Tensor | None,
    ctx: Context,
    *,
    slot: int,
    softplus: bool,
    limit: tuple[float, float],
) -> Tensor:
    """Δ = clamp(softplus(dt + dt_bias), *limit);  h ← exp(Δ A) h + Δ x ⊗ B;  y = h C + D x; [B, S, H, P] in x's dtype.

    Without `softplus`, Δ = clamp(dt + dt_bias, *limit). Head h has group h // (H / G). Padding writes nothing. State:
    [B, H, P, N] in fp32 (fp64 of fp64).
    """
    before_BHPN = state_before(ctx, slot, "state_space")
    x = without_padding(x_BSHP, ctx, 1)
    options = softplus, float(limit[0]), float(limit[1])
    if x.shape[1] == 1:
        first_x, first_dt, first_B, first_C = (m[:, 0] for m in (x, dt_BSH, B_BSGN, C_BSGN))
        y_BHP, state = _one_token(first_x, first_dt, A_H, first_B, first_C, D_H, dt_bias_H, before_BHPN, *options)
        y_BSHP = y_BHP[:, None]
    else:
        y_BSHP, state = _sequence(x, dt_BSH, A_H, B_BSGN, C_BSGN, D_H, dt_bias_H, before_BHPN, *options)
    state_after(ctx, slot, state, y_BSHP)
    return y_BSHP


def _step_sizes(
    dt: Tensor, bias_H: Tensor | None, dtype: torch.dtype, softplus: bool, low: float, high: float
) -> Tensor:
    """Δ in `dtype`, of dt [..., H]."""
    dt = dt.to(dtype) if bias_H is None else dt.to(dtype) + bias_H.to(dtype)
    return (F.softplus(dt) if softplus else dt).clamp(low, high)


def _one_token(
    x_BHP: Tensor,
    dt_BH: Tensor,
    A_H: Tensor,
    B_BGN: Tensor,
    C_BGN: Tensor,
    D_H: Tensor | None,
    dt_bias_H: Tensor | None,
    h_BHPN: Tensor | None,
    softplus: bool,
    low: float,
    high: float,
) -> tuple[Tensor, Tensor]:
    wide = accumulation_dtype(x_BHP.dtype)
    x, heads = x_BHP.to(wide), x_BHP.shape[1]
    B_BHN, C_BHN = (m.to(wide).repeat_interleave(heads // m.shape[1], 1) for m in (B_BGN, C_BGN))
    dt_BH = _step_sizes(dt_BH, dt_bias_H, wide, softplus, low, high)
    if h_BHPN is None:
        h_BHPN = x.new_zeros(*x.shape, B_BHN.shape[2])
    write_BHPN = in_memory(dt_BH[..., None] * x)[..., None] * B_BHN[:, :, None]
    state = in_memory((dt_BH * A_H.to(wide)).exp())[..., None, None] * h_BHPN + write_BHPN
    y_BHP = (state * C_BHN[:, :, None]).sum(3)
    return (y_BHP if D_H is None else y_BHP + D_H.to(wide)[:, None] * x).to(x_BHP.dtype), state


def _state_space(
    x_BSHP: Tensor,
    dt_BSH: Tensor,
    A_H: Tensor,
    B_BSGN: Tensor,
    C_BSGN: Tensor,
    D_H: Tensor | None,
    dt_bias_H: Tensor | None,
    state: Tensor | None,
    softplus: bool,
    low: float,
    high: float,
) -> tuple[Tensor, Tensor]:
    """By chunks [B, heads, chunks, CHUNK, ...]."""
    wide, heads = accumulation_dtype(x_BSHP.dtype), x_BSHP.shape[2] // B_BSGN.shape[2]
    dt_BSH = _step_sizes(dt_BSH, dt_bias_H, wide, softplus, low, high)
    x_wide = x_BSHP.to(wide)
    log, written, B, C = (
        chunked(m.transpose(1, 2), 2)
        for m in (dt_BSH * A_H.to(wide), dt_BSH[..., None] * x_wide, B_BSGN.to(wide), C_BSGN.to(wide))
    )
    log = log.double().cumsum(-1)
    y = ((C @ B.mT).repeat_interleave(heads, 1) * decay_matrix(log, wide)) @ written
    B, C = (m.repeat_interleave(heads, 1) for m in (B, C))
    until, since = (log[..., -1:] - log).to(wide).exp(), log.to(wide).exp()
    added = (written * until[..., None]).mT @ B  # by each chunk to the state, [B, H, chunks, P, N]
    h_BHPN = torch.zeros_like(added[:, :, 0]) if state is None else state
    before = []
    for n in range(added.shape[2]):
        before.append(h_BHPN)
        h_BHPN = since[:, :, n, -1, None, None] * h_BHPN + added[:, :, n]
    y = y + since[..., None] * (C @ torch.stack(before, 2).mT)
    y_BSHP = y.flatten(2, 3)[:, :, : x_BSHP.shape[1]].transpose(1, 2)
    return (y_BSHP if D_H is None else y_BSHP + D_H.to(wide)[:, None] * x_wide).to(x_BSHP.dtype), h_BHPN


def _fake(x_BSHP: Tensor, dt_BSH: Tensor, A_H: Tensor, B_BSGN: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch, _, heads, width = x_BSHP.shape
    state = x_BSHP.new_empty(batch, heads, width, B_BSGN.shape[3], dtype=accumulation_dtype(x_BSHP.dtype))
    return x_BSHP.new_empty(x_BSHP.shape), state


_sequence = sequence_operator(
    _state_space, _fake, dict.fromkeys(("x_BSHP", "dt_BSH", "B_BSGN", "C_BSGN"), 1), _PIECE, kernels.state_space
)

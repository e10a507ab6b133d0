"""Recurrences of single numbers, each with a decay of its own: Mamba 1's and RG-LRU's.

No matrix does their work. A sequence is cut into chunks whose tokens are computed side by side, the first ones of all
chunks, then the second ones: once from zeros, for what each chunk adds to the state, and once from the states that
follow. So there are as many steps as a chunk has tokens, however long the sequence is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rewriter.kernels import accumulation_dtype
from rewriter.runtime.context import Context
from rewriter.runtime.mixers import kernels
from rewriter.runtime.mixers.chunks import CHUNK, chunked
from rewriter.runtime.mixers.sequence_operator import sequence_operator
from rewriter.runtime.mixers.state import state_after, state_before, without_padding

_PIECE = 1024  # tokens at once


def selective_scan(
    x_BCS: Tensor,
    dt_BCS: Tensor,
    A_CN: Tensor,
    B_BNS: Tensor,
    C_BNS: Tensor,
    D_C: Tensor | None,
    z_BCS: Tensor | None,
    dt_bias_C: Tensor | None,
    ctx: Context,
    *,
    slot: int,
    softplus: bool,
) -> Tensor:
    """Δ = softplus(dt + dt_bias);  h ← exp(Δ A) h + Δ x B;  y = (h · C + D x) · silu(z); [B, C, S] in x's dtype.

    Without `softplus`, Δ = dt + dt_bias; without `z_BCS`, nothing is gated. Padding writes nothing. State: [B, C, N] in
    fp32 (fp64 of fp64).
    """
    before_BCN = state_before(ctx, slot, "selective_scan")
    x = without_padding(x_BCS, ctx, 2)
    if x.shape[2] == 1:
        y, state = _selective_step(x, dt_BCS, A_CN, B_BNS, C_BNS, dt_bias_C, before_BCN, softplus)
    else:
        y, state = _selective_sequence(x, dt_BCS, A_CN, B_BNS, C_BNS, dt_bias_C, before_BCN, softplus)
    state_after(ctx, slot, state, y)
    wide = y.dtype
    if D_C is not None:
        y = y + D_C.to(wide)[:, None] * x.to(wide)
    return (y if z_BCS is None else y * F.silu(z_BCS.to(wide))).to(x_BCS.dtype)


def _step_sizes(dt_BCS: Tensor, bias_C: Tensor | None, dtype: torch.dtype, softplus: bool) -> Tensor:
    dt = dt_BCS.to(dtype) if bias_C is None else dt_BCS.to(dtype) + bias_C.to(dtype)[:, None]
    return F.softplus(dt) if softplus else dt


def _selective_step(
    x_BC1: Tensor,
    dt_BC1: Tensor,
    A_CN: Tensor,
    B_BN1: Tensor,
    C_BN1: Tensor,
    dt_bias_C: Tensor | None,
    h_BCN: Tensor | None,
    softplus: bool,
) -> tuple[Tensor, Tensor]:
    wide = accumulation_dtype(x_BC1.dtype)
    x, A, B_B1N, C_B1N = x_BC1.to(wide), A_CN.to(wide), B_BN1.to(wide).mT, C_BN1.to(wide).mT
    dt = _step_sizes(dt_BC1, dt_bias_C, wide, softplus)
    written = dt * x * B_B1N
    state = written if h_BCN is None else (dt * A).exp() * h_BCN + written
    return (state * C_B1N).sum(2, keepdim=True), state


def _selective_scan(
    x_BCS: Tensor,
    dt_BCS: Tensor,
    A_CN: Tensor,
    B_BNS: Tensor,
    C_BNS: Tensor,
    dt_bias_C: Tensor | None,
    state: Tensor | None,
    softplus: bool,
) -> tuple[Tensor, Tensor]:
    """h · C in the accumulation dtype."""
    wide = accumulation_dtype(x_BCS.dtype)
    A, length = A_CN.to(wide), x_BCS.shape[2]
    dt = _step_sizes(dt_BCS, dt_bias_C, wide, softplus)
    written, dt, B, C = (_side_by_side(m.mT) for m in (dt * x_BCS.to(wide), dt, B_BNS.to(wide), C_BNS.to(wide)))

    def after(t: int, h: Tensor) -> Tensor:
        return torch.addcmul(written[t, ..., None] * B[t, :, :, None], (dt[t, ..., None] * A).exp(), h)

    first = x_BCS.new_zeros(x_BCS.shape[0], *A.shape, dtype=wide) if state is None else state
    h, last = _states_before_chunks(after, (dt.sum(0)[..., None] * A).exp(), first, len(dt))
    out = []
    for t in range(len(dt)):
        h = after(t, h)
        out.append((h @ C[t, ..., None]).squeeze(-1))
    return torch.stack(out, 2).flatten(1, 2)[:, :length].mT, last


def _side_by_side(x_BSC: Tensor) -> Tensor:
    """[L, B, chunks, C] in memory: the t-th tokens of all chunks at t."""
    return chunked(x_BSC, 1, min(CHUNK, x_BSC.shape[1])).movedim(2, 0).contiguous()


def _states_before_chunks(
    after: Callable[[int, Tensor], Tensor], decay: Tensor, state: Tensor, length: int
) -> tuple[Tensor, Tensor]:
    """The state before each chunk, [B, chunks, ...], and after the last, of `decay` [B, chunks, ...] over a chunk."""
    h = torch.zeros_like(decay)
    for t in range(length):
        h = after(t, h)
    before = []
    for n in range(decay.shape[1]):
        before.append(state)
        state = decay[:, n] * state + h[:, n]
    return torch.stack(before, 1), state


def linear_scan(x_BSC: Tensor, log_decay_BSC: Tensor, ctx: Context, *, slot: int) -> Tensor:
    """h ← exp(log_decay) h + x per channel; every h, [B, S, C] in x's dtype.

    `log_decay_BSC` is at most 0. Padding writes nothing. State: [B, C] in fp32 (fp64 of fp64).
    """
    before_BC = state_before(ctx, slot, "linear_scan")
    x = without_padding(x_BSC, ctx, 1)
    if x.shape[1] == 1:
        wide = accumulation_dtype(x.dtype)
        state = x[:, 0].to(wide)
        if before_BC is not None:
            state = log_decay_BSC[:, 0].to(wide).exp() * before_BC + state
        h_BSC = state[:, None].to(x.dtype)
    else:
        h_BSC, state = _linear_sequence(x, log_decay_BSC, before_BC)
    state_after(ctx, slot, state, h_BSC)
    return h_BSC


def _linear_scan(x_BSC: Tensor, log_decay_BSC: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    wide = accumulation_dtype(x_BSC.dtype)
    x, log = (_side_by_side(m.to(wide)) for m in (x_BSC, log_decay_BSC))
    decay = log.exp()

    def after(t: int, h: Tensor) -> Tensor:
        return torch.addcmul(x[t], decay[t], h)

    first = torch.zeros_like(x[0, :, 0]) if state is None else state
    h, last = _states_before_chunks(after, log.sum(0).exp(), first, len(x))
    out = []
    for t in range(len(x)):
        h = after(t, h)
        out.append(h)
    return torch.stack(out, 2).flatten(1, 2)[:, : x_BSC.shape[1]].to(x_BSC.dtype), last


def _selective_fake(x_BCS: Tensor, dt_BCS: Tensor, A_CN: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    wide = accumulation_dtype(x_BCS.dtype)
    return x_BCS.new_empty(x_BCS.shape, dtype=wide), x_BCS.new_empty(x_BCS.shape[0], *A_CN.shape, dtype=wide)


def _linear_fake(x_BSC: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    wide = accumulation_dtype(x_BSC.dtype)
    return x_BSC.new_empty(x_BSC.shape), x_BSC.new_empty(x_BSC.shape[0], x_BSC.shape[2], dtype=wide)


_selective_sequence = sequence_operator(
    _selective_scan,
    _selective_fake,
    dict.fromkeys(("x_BCS", "dt_BCS", "B_BNS", "C_BNS"), 2),
    _PIECE,
    kernels.selective_scan,
)
_linear_sequence = sequence_operator(_linear_scan, _linear_fake, dict.fromkeys(("x_BSC", "log_decay_BSC"), 1), _PIECE)

"""The gated delta rule: a matrix per head that each token corrects where its key reads it.

In a chunk, what each token writes follows from a triangular system (arXiv 2406.06484 and 2412.06464, section 3). With
c the sum of g from the chunk's first token on, and h the state before it,

    A[i, j] = β[i] Σ_d k[i, d] k[j, d] exp(c[i, d] − c[j, d])  for j < i,    (1 + A) u = β v − (β k exp(c)) h
    P[i, j] =      Σ_d q[i, d] k[j, d] exp(c[i, d] − c[j, d])  for j ≤ i,    o = (q exp(c)) h + P u
    h ← exp(c[L]) h + (k exp(c[L] − c))ᵀ u
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rewriter.ir.recurrences import L2_EPSILON
from rewriter.kernels import accumulation_dtype
from rewriter.runtime.compiled import in_memory
from rewriter.runtime.context import Context
from rewriter.runtime.mixers import kernels
from rewriter.runtime.mixers.chunks import chunked, decay_matrix, lower
from rewriter.runtime.mixers.sequence_operator import sequence_operator
from rewriter.runtime.mixers.state import state_after, state_before, without_padding

_PIECE = 256  # tokens at once
_TILE = 8  # tokens between which decays of each key channel are computed pair by pair


def delta_rule(
    q_BSGD: Tensor,
    k_BSGD: Tensor,
    v_BSHE: Tensor,
    g: Tensor,
    beta_BSH: Tensor,
    ctx: Context,
    *,
    slot: int,
    l2norm: bool,
    scale: float,
    delta: bool = True,
) -> Tensor:
    """h ← exp(g) h;  h ← h + k ⊗ β (v − hᵀk), without `delta` h + k ⊗ β v;  o = scale · hᵀq; [B, S, H, E] in v's dtype.

    `g` [B, S, H], or [B, S, H, D] for each key channel, is at most 0; head h has key head h // (H / G). `l2norm`: q and
    k are divided by their length. Padding writes nothing. State: [B, H, D, E] in fp32 (fp64 of fp64).
    """
    before_BHDE = state_before(ctx, slot, "delta_rule")
    beta = without_padding(beta_BSH, ctx, 1)
    options = (l2norm, scale, delta)
    if v_BSHE.shape[1] == 1:
        q, k, v, g, beta = (x[:, 0] for x in (q_BSGD, k_BSGD, v_BSHE, g, beta))
        o_BHE, state = _one_token(q, k, v, g, beta, before_BHDE, *options)
        o_BSHE = o_BHE[:, None]
    else:
        o_BSHE, state = _sequence(q_BSGD, k_BSGD, v_BSHE, g, beta, before_BHDE, *options)
    state_after(ctx, slot, state, o_BSHE)
    return o_BSHE


def _one_token(
    q_BGD: Tensor,
    k_BGD: Tensor,
    v_BHE: Tensor,
    g: Tensor,
    beta_BH: Tensor,
    h_BHDE: Tensor | None,
    l2norm: bool,
    scale: float,
    delta: bool,
) -> tuple[Tensor, Tensor]:
    """The state is read for both products at once, and once more when it is written: o = (exp(g) q)ᵀh + (q · k) u."""
    q, k, v, g, beta = _wide(v_BHE, q_BGD, k_BGD, v_BHE, g, beta_BH)
    q_BHD, k_BHD = (in_memory(x.repeat_interleave(v.shape[1] // x.shape[1], 1)) for x in _normed(q, k, l2norm))
    decay = in_memory((g if g.dim() == 3 else g[..., None]).exp())  # [B, H, D or 1]
    if h_BHDE is None:
        h_BHDE = v.new_zeros(*v.shape[:2], k_BHD.shape[2], v.shape[2])
    read_BHE = (h_BHDE * in_memory(decay * q_BHD)[..., None]).sum(2)
    if delta:
        v = v - (h_BHDE * in_memory(decay * k_BHD)[..., None]).sum(2)
    u_BHE = in_memory(beta[..., None] * v)
    o_BHE = scale * (read_BHE + (q_BHD * k_BHD).sum(2)[..., None] * u_BHE)
    return o_BHE.to(v_BHE.dtype), decay[..., None] * h_BHDE + k_BHD[..., None] * u_BHE[:, :, None]


def _wide(like: Tensor, *given: Tensor) -> list[Tensor]:
    wide = accumulation_dtype(like.dtype)
    return [x.to(wide) for x in given]


def _normed(q: Tensor, k: Tensor, l2norm: bool) -> tuple[Tensor, Tensor]:
    if not l2norm:
        return q, k
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPSILON) for x in (q, k))
    return q, k


def _delta_rule(
    q_BSGD: Tensor,
    k_BSGD: Tensor,
    v_BSHE: Tensor,
    g: Tensor,
    beta_BSH: Tensor,
    state: Tensor | None,
    l2norm: bool,
    scale: float,
    delta: bool,
) -> tuple[Tensor, Tensor]:
    """By chunks [B, heads, chunks, CHUNK, ...]."""
    q, k, v, g, beta = (chunked(x.transpose(1, 2), 2) for x in _wide(v_BSHE, q_BSGD, k_BSGD, v_BSHE, g, beta_BSH))
    q, k = _normed(q, k, l2norm)
    heads = v.shape[1] // k.shape[1]
    q = q * scale
    if g.dim() == 4:  # one decay per head
        log = g.double().cumsum(-1)
        decay = decay_matrix(log, v.dtype)
        qk, kk = ((x @ k.mT).repeat_interleave(heads, 1) * decay for x in (q, k))
        q, k = (x.repeat_interleave(heads, 1) for x in (q, k))
        log = log[..., None]
    else:
        log = g.double().cumsum(-2)
        q, k = (x.repeat_interleave(heads, 1) for x in (q, k))
        qk, kk = _decayed_products(torch.stack([q, k]), k, log).unbind()
    since, until = log.to(v.dtype).exp(), (log[..., -1:, :] - log).to(v.dtype).exp()
    q, k_since, k_until = q * since, k * since * beta[..., None], k * until
    system = (kk * beta[..., None]).masked_fill(~lower(kk.shape[-1], kk, -1), 0)
    v = v * beta[..., None]
    h_BHDE = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1]) if state is None else state
    out = []
    for n in range(v.shape[2]):
        u = v[:, :, n]
        if delta:
            u = u - k_since[:, :, n] @ h_BHDE
            u = torch.linalg.solve_triangular(system[:, :, n], u, upper=False, unitriangular=True)
        out.append(q[:, :, n] @ h_BHDE + qk[:, :, n] @ u)
        h_BHDE = since[:, :, n, -1, :, None] * h_BHDE + k_until[:, :, n].mT @ u
    o_BHSE = torch.cat(out, 2)[:, :, : v_BSHE.shape[1]]
    return o_BHSE.transpose(1, 2).to(v_BSHE.dtype), h_BHDE


def _decayed_products(a: Tensor, b: Tensor, log: Tensor) -> Tensor:
    """Σ_d a[i, d] b[j, d] exp(log[i, d] − log[j, d]) [..., L, L] for j ≤ i, else 0; a, b, log [..., L, D].

    In tiles pair by pair. Between two tiles, decays are split where the second begins, so that neither part grows, and
    two tiles are one of twice their size.
    """
    a, b, log = (x.unflatten(-2, (-1, _TILE)) for x in (a, b, log))
    difference = (log[..., :, None, :] - log[..., None, :, :]).to(b.dtype)
    decay = difference.masked_fill(~lower(_TILE, b)[..., None], -torch.inf).exp()
    products = torch.einsum("...id,...ijd->...ij", a, b[..., None, :, :] * decay)
    while products.shape[-3] > 1:
        a, b, log = (x.unflatten(-3, (-1, 2)) for x in (a, b, log))
        begin = log[..., 1, :1, :]
        second = a[..., 1, :, :] * (log[..., 1, :, :] - begin).to(b.dtype).exp()
        first = b[..., 0, :, :] * (begin - log[..., 0, :, :]).to(b.dtype).exp()
        cross, pair = second @ first.mT, products.unflatten(-3, (-1, 2))
        upper = torch.cat([pair[..., 0, :, :], torch.zeros_like(cross)], -1)
        products = torch.cat([upper, torch.cat([cross, pair[..., 1, :, :]], -1)], -2)
        a, b, log = (x.flatten(-3, -2) for x in (a, b, log))
    return products.squeeze(-3)


def _fake(q_BSGD: Tensor, k_BSGD: Tensor, v_BSHE: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch, _, heads, width = v_BSHE.shape
    state = v_BSHE.new_empty(batch, heads, k_BSGD.shape[3], width, dtype=accumulation_dtype(v_BSHE.dtype))
    return v_BSHE.new_empty(v_BSHE.shape), state


_sequence = sequence_operator(
    _delta_rule, _fake, dict.fromkeys(("q_BSGD", "k_BSGD", "v_BSHE", "g", "beta_BSH"), 1), _PIECE, kernels.delta_rule
)

"""Attention over a set of keys from attention over its parts: partial outputs weighted by their share of the
log-sum-exp (arXiv 2503.15758, Alg. 2, line 8).

With outputs o_p and log-sum-exps l_p over disjoint keys, l = log Σ exp l_p and o = Σ exp(l_p − l) · o_p. A part whose
row saw nothing has o_p = 0 and l_p = −inf, and weighs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rewriter.kernels.devices import runs_triton

Parts = Sequence[tuple[Tensor, Tensor]]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that partial results of `dtype` are summed in: fp32, and fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sum_into(x: Tensor, parts: Sequence[Tensor]) -> None:
    """`x` becomes the sum of `parts`, all like `x`, one of which it may be.

    They are added in their order, so that whoever adds the same parts gets the same bits, in the accumulation dtype,
    and rounded once.
    """
    total = parts[0].to(accumulation_dtype(x.dtype), copy=True)
    for part in parts[1:]:
        total += part
    x.copy_(total)


def merge(parts: Parts, *, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """(o_BHSE, lse_BHS) from partial ones of these shapes; rows that no part saw are 0 and −inf.

    o is in `dtype`, lse and, where none is given, o in the accumulation dtype: sums are made in it and rounded once.
    Parts may differ in dtype and have any strides, so that they are read from the messages in which they came. On CUDA
    one Triton kernel reads each part once; elsewhere, and for fp64, plain PyTorch.
    """
    first, wide = parts[0][0], accumulation_dtype(parts[0][0].dtype)
    dtype = dtype or wide
    if wide == torch.float32 and runs_triton(first):
        from rewriter.kernels.merge_triton import launch

        out, lse = first.new_empty(first.shape, dtype=dtype), first.new_empty(first.shape[:-1], dtype=wide)
        launch(parts, out, lse)
        return out, lse
    o, lse = merge_reference(parts)
    return o.to(dtype), lse


def merge_reference(parts: Parts) -> tuple[Tensor, Tensor]:
    """The specification: (o, lse) in the accumulation dtype, for any leading dimensions."""
    dtype = accumulation_dtype(parts[0][0].dtype)
    lse_P = torch.stack([lse.to(dtype) for _, lse in parts])
    top = lse_P.amax(0)
    # where a row saw nothing, −inf − −inf would be NaN: weigh with exp(−inf − 0) = 0 instead
    weight_P = torch.exp(lse_P - top.masked_fill(top == -torch.inf, 0))
    # the largest part weighs 1, so that a sum of weights is at least 1, or 0 if nothing saw a key
    total = weight_P.sum(0).clamp(min=1)
    o = torch.zeros_like(parts[0][0], dtype=dtype)
    for (part, _), weight in zip(parts, weight_P, strict=True):
        o.addcmul_(part.to(dtype), weight.unsqueeze(-1))
    return o.div_(total.unsqueeze(-1)), top + total.log()

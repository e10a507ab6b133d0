"""Sums over ranks, and keys and values, that travel quantized: every rank's steps, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from rewriter.kernels import dequantize_rows, parse_format, quantize_rows, slice_length


def quantized_sum(parts: Sequence[torch.Tensor], format: str, min_bytes: int = 0) -> torch.Tensor:
    """Result of the all-reduce of `parts`, one tensor a rank; see `rewriter.ir.ops.all_reduce`.

    The gradient of every part is the result's, as it is of an exact sum. Parts in fp64 travel as fp32.
    """
    if parts[0].nbytes < min_bytes:
        return sum(parts[1:], parts[0])
    result: torch.Tensor = _SameGradient.apply(_reduced(parts, format), *parts)
    return result


def arrived(x: torch.Tensor, format: str) -> torch.Tensor:
    """`x` [..., n] as all ranks have it where each vector of n elements travels by itself.

    The gradient of x is that of the result. x in fp64 travels as fp32.
    """
    rows_RN = _wire(x).reshape(-1, x.shape[-1])
    result: torch.Tensor = _SameGradient.apply(_sent(rows_RN, format, rows_RN.dtype).view(x.shape).to(x.dtype), x)
    return result


class _SameGradient(torch.autograd.Function):
    """`value`, whose gradient each of `parts` has."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
        ctx.parts = len(parts)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *(gradient,) * ctx.parts


@torch.no_grad()
def _reduced(parts: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    format, ranks, like = parse_format(name), len(parts), parts[0]
    length = slice_length(like.numel(), ranks, format)
    padding = (0, ranks * length - like.numel())
    slices_PRN = [F.pad(_wire(part).reshape(-1), padding).view(ranks, length) for part in parts]
    arrived_PRN = [_sent(rows, name, torch.float32) for rows in slices_PRN]
    total_RN = torch.zeros(ranks, length, device=like.device)
    for owner in range(ranks):
        for sender in range(ranks):
            if sender != owner:
                total_RN[owner] += arrived_PRN[sender][owner]
        total_RN[owner] += slices_PRN[owner][owner].float()
    result = _sent(total_RN, name, slices_PRN[0].dtype)
    return result.reshape(-1)[: like.numel()].view(like.shape).to(like.dtype)


@torch.no_grad()
def _sent(rows_RN: torch.Tensor, format: str, dtype: torch.dtype) -> torch.Tensor:
    return dequantize_rows(quantize_rows(rows_RN, format), format, rows_RN.shape[1], dtype)


def _wire(x: torch.Tensor) -> torch.Tensor:
    return x.detach().float() if x.dtype == torch.float64 else x.detach()

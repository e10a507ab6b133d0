"""What sums over ranks, and keys and values, are when they travel quantized: every rank's steps, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from rewriter.kernels import dequantize_rows, parse_format, quantize_rows, slice_length


def quantized_sum(parts: Sequence[torch.Tensor], format: str, min_bytes: int = 0) -> torch.Tensor:
    """What all ranks hold after the all-reduce of `parts`, one tensor a rank; see `rewriter.ops.all_reduce`.

    The gradient of every part is the result's, as it is of an exact sum. Parts in fp64 travel as fp32.
    """
    if parts[0].nbytes < min_bytes:
        return sum(parts[1:], parts[0])
    result: torch.Tensor = _StraightThrough.apply(format, *parts)
    return result


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, format: str, *parts: torch.Tensor) -> torch.Tensor:
        ctx.ranks = len(parts)
        return _reduced(parts, format)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *(gradient,) * ctx.ranks)


def _reduced(parts: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    format, ranks, like = parse_format(name), len(parts), parts[0]
    length = slice_length(like.numel(), ranks, format)
    wire = torch.float32 if like.dtype == torch.float64 else like.dtype
    padding = (0, ranks * length - like.numel())
    slices_PRN = [F.pad(part.reshape(-1).to(wire), padding).view(ranks, length) for part in parts]
    arrived_PRN = [dequantize_rows(quantize_rows(rows, format), format, length, torch.float32) for rows in slices_PRN]
    total_RN = torch.zeros(ranks, length, device=like.device)
    for owner in range(ranks):
        for sender in range(ranks):
            if sender != owner:
                total_RN[owner] += arrived_PRN[sender][owner]
        total_RN[owner] += slices_PRN[owner][owner].float()
    result = dequantize_rows(quantize_rows(total_RN, format), format, length, wire)
    return result.reshape(-1)[: like.numel()].view(like.shape).to(like.dtype)


def arrived(x: torch.Tensor, format: str) -> torch.Tensor:
    """`x` [..., n] as all ranks have it where each vector of n elements travels by itself; its gradient is straight."""
    result: torch.Tensor = _Arrived.apply(x, format)
    return result


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, format: str) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        rows = rows.float() if x.dtype == torch.float64 else rows
        return dequantize_rows(quantize_rows(rows, format), format, rows.shape[1], rows.dtype).view(x.shape).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


__all__ = ["arrived", "quantized_sum"]

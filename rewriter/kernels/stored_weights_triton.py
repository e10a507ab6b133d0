"""The kernels of `rewriter.kernels.stored_weights`: codes and scales in, fp32, bf16 or fp16 out.

FP8 codes are read as bytes and their bits put in place by integers, so that GPUs without FP8 run them (before sm89).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import triton
import triton.language as tl

from rewriter.kernels.devices import current_device

ROWS = 32
COLUMNS = 128


@triton.jit
def scale_at(scales, at, mask, EXPONENTS: tl.constexpr):
    scale = tl.load(scales + at, mask=mask, other=0)
    if EXPONENTS:
        # 2 ** (byte - 127) has the byte as its exponent; 2 ** -127 is subnormal
        code = scale.to(tl.int32)
        return tl.where(code == 0, 4194304, code << 23).to(tl.float32, bitcast=True)
    return scale.to(tl.float32)


@triton.jit
def fp8_kernel(
    codes,  # uint8 [E, R, C], contiguous
    scales,  # [E or 1, r, c], contiguous
    out,  # [E, R, C], contiguous
    rows,
    columns,
    scale_matrix,  # elements of scales between one matrix and the next; 0 where they share it
    scale_columns,
    per_row,
    per_column,
    E5M2: tl.constexpr,
    EXPONENTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    matrix = tl.program_id(2).to(tl.int64)
    real = (i < rows)[:, None] & (j < columns)[None, :]
    at = (matrix * rows + i)[:, None] * columns + j[None, :]
    code = tl.load(codes + at, mask=real, other=0).to(tl.int32)
    if E5M2:
        # the upper half of an fp16
        value = (code << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        exponent, mantissa = code >> 3 & 15, code & 7
        normal = (exponent + 120 << 23 | mantissa << 20).to(tl.float32, bitcast=True)
        value = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal)
        value = tl.where(code & 127 == 127, float("nan"), value)
        value = tl.where(code >= 128, -value, value)
    scale = scale_at(
        scales, matrix * scale_matrix + (i // per_row)[:, None] * scale_columns + (j // per_column)[None, :],
        real, EXPONENTS,
    )  # fmt: skip
    tl.store(out + at, (value * scale).to(out.dtype.element_ty), mask=real)


@triton.jit
def mxfp4_kernel(
    blocks,  # uint8 [N, B], contiguous
    scales,  # uint8 [N]
    out,  # [N, 2 B], contiguous
    count,
    B: tl.constexpr,
    ROWS: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    byte = tl.arange(0, B)
    real = i < count
    pair = tl.load(blocks + i[:, None] * B + byte[None, :], mask=real[:, None], other=0).to(tl.int32)
    scale = scale_at(scales, i, real, True)
    for half in tl.static_range(2):
        code = pair >> 4 * half & 15
        exponent, mantissa = code >> 1 & 3, code & 1
        normal = (exponent + 126 << 23 | mantissa << 22).to(tl.float32, bitcast=True)
        value = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.5, normal)
        value = tl.where(code >= 8, -value, value) * scale[:, None]
        at = i[:, None] * (2 * B) + (2 * byte + half)[None, :]
        tl.store(out + at, value.to(out.dtype.element_ty), mask=real[:, None])


def fp8(codes: torch.Tensor, scales: torch.Tensor, per: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """`rewriter.kernels.stored_weights.fp8`, rounded to `dtype`, of two dimensions or three: [E, R, C], of which
    every matrix has its own scales, or all have the same."""
    shape = codes.shape
    matrices, (rows, columns) = codes.numel() // (shape[-2] * shape[-1]), shape[-2:]
    # dimensions that scales lack, and those of one scale, are of one block
    sizes = [1] * (codes.dim() - scales.dim()) + list(scales.shape)
    counts = [1] * (codes.dim() - len(per)) + list(per)
    if prod(sizes[:-2]) not in (1, matrices):
        raise ValueError(f"scales {list(scales.shape)}: expected one grid, or one for each of {matrices} matrices")
    per_row, per_column = (shape[d] if sizes[d] == 1 else counts[d] for d in (-2, -1))
    out = torch.empty(shape, dtype=dtype, device=codes.device)
    exponents = scales.dtype in (torch.uint8, torch.float8_e8m0fnu)
    grid = (triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS), matrices)
    with current_device(codes):
        fp8_kernel[grid](
            codes.contiguous().view(torch.uint8), (scales.view(torch.uint8) if exponents else scales).contiguous(), out,
            rows, columns, sizes[-2] * sizes[-1] if prod(sizes[:-2]) > 1 else 0, sizes[-1], per_row, per_column,
            E5M2=codes.dtype == torch.float8_e5m2, EXPONENTS=exponents, ROWS=ROWS, COLUMNS=COLUMNS,
        )  # fmt: skip
    return out


def mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`rewriter.kernels.stored_weights.mxfp4`, rounded to `dtype`."""
    *lead, groups, width = blocks.shape
    out = torch.empty((*lead, 2 * groups * width), dtype=dtype, device=blocks.device)
    count = scales.numel()
    with current_device(blocks):
        mxfp4_kernel[(triton.cdiv(count, 4 * ROWS),)](
            blocks.contiguous(), scales.contiguous(), out, count, B=width, ROWS=4 * ROWS
        )
    return out

"""Launches of the kernels of `rows_triton`: shapes of tiles, and the small tensors that kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from rewriter.kernels import blocks
from rewriter.kernels.formats import Format
from rewriter.kernels.rows_triton import dequantize_kernel, quantize_kernel

WARPS = 4
_BYTES = 16 * 32 * WARPS  # of a plane's run in a tile: what its threads store at once
_LEAST_ROWS = 16  # of a product of matrices
_ELEMENTS = 8192  # of a tile whose blocks are rotated


def quantize_rows(x_RN: Tensor, format: Format, order: Sequence[int] | None, seed: int | None, out_RB: Tensor) -> None:
    """Write the payloads of x's rows, in `order`, to `out`."""
    rows, n = out_RB.shape[0], x_RN.shape[1]
    if rows == 0 or n == 0:
        return
    if x_RN.stride(1) != 1:
        x_RN = x_RN.contiguous()
    shape = geometry(format)
    tiles = -(-format.blocks(n) // shape["K"])
    with _device(x_RN):
        quantize_kernel[(rows * tiles,)](
            x_RN,
            None if order is None else _order(tuple(order), x_RN.shape[0], x_RN.device),
            _scaled_matrix(format, _factor_dtype(x_RN.dtype), x_RN.device),
            out_RB,
            n,
            tiles,
            _stride(x_RN),
            _stride(out_RB),
            _seed(seed),
            DITHER=seed is not None,
            **shape,
            **_OPTIONS,
        )


def dequantize_rows(payload_RB: Tensor, format: Format, n: int, seed: int | None, out_RN: Tensor) -> None:
    """Write what rows of payloads stand for to `out`."""
    rows = out_RN.shape[0]
    if rows == 0 or n == 0:
        return
    shape = geometry(format)
    tiles = -(-format.blocks(n) // shape["K"])
    with _device(out_RN):
        dequantize_kernel[(rows * tiles,)](
            payload_RB,
            _matrix_of(format, torch.float16, out_RN.device),
            out_RN,
            n,
            tiles,
            _stride(payload_RB),
            _stride(out_RN),
            _seed(seed),
            DITHER=seed is not None,
            FINITE=torch.finfo(out_RN.dtype).max,
            **shape,
            **_OPTIONS,
        )


_INTERPRETED = triton.knobs.runtime.interpret
_OPTIONS: dict[str, Any] = {"INTERPRETED": _INTERPRETED, "num_warps": WARPS, "enable_fp_fusion": False}


@cache
def geometry(format: Format) -> dict[str, Any]:
    """The constants of a format: a tile is K blocks of P parts."""
    parts = 8 // min(format.planes)
    if format.rotated:
        # small matrices: sums and differences across parts cost less than a large one in every program
        parts = min(8, max(parts, format.block // 32))
    width = format.block // parts
    count = max(1, _BYTES // width)
    if format.rotated:
        count = max(_LEAST_ROWS, min(64, _ELEMENTS // format.block))
    return {"BITS": format.bits, "ROTATED": format.rotated, "BLOCK": format.block, "K": count, "P": parts}


@cache
def _matrix_of(format: Format, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Hadamard's matrix that rotates a part."""
    return blocks.hadamard(format.block // geometry(format)["P"], device).to(dtype) if format.rotated else None


@cache
def _scaled_matrix(format: Format, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """The same, over the block's size: no sum of a block's numbers overflows."""
    matrix = _matrix_of(format, torch.float32, device)
    return None if matrix is None else (matrix / format.block).to(dtype)


@lru_cache(256)
def _order(order: tuple[int, ...], rows: int, device: torch.device) -> Tensor:
    """As indices of rows; raises IndexError as indexing does."""
    return torch.arange(rows, dtype=torch.int32)[list(order)].to(device)


def _factor_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the matrix for numbers of `dtype`; fp32 ones are multiplied as three of bf16."""
    return torch.bfloat16 if dtype == torch.float32 else dtype


def _stride(x_RN: Tensor) -> int:
    """Between rows; 0 where there is one, so that no length makes a kernel of its own."""
    return x_RN.stride(0) if x_RN.shape[0] > 1 else 0


def _seed(seed: int | None) -> int:
    """32 bits with a sign, which is one type of argument for all seeds."""
    return ((seed or 0) + (1 << 31)) % (1 << 32) - (1 << 31)


def _device(x: Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()

"""Launches of the kernels of `rows_triton` and `sums_triton`: tiles, and small tensors that kernels read."""

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
from rewriter.kernels.sums_triton import reduce_kernel, requantize_kernel

WARPS = 4
_ALL_REGISTERS = 255  # of a thread: rotated sums spill where the compiler aims at fewer
_REGISTERS = 168  # of a thread, so that three programs fit on a multiprocessor
_BYTES = 16 * 32 * WARPS  # of a plane's run in a tile: what its threads store at once
_FEWEST = 32 * 32 * WARPS  # elements of a tile: so many for a thread that its addresses and scales do not cost much
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
            _scaled_matrix(format, shape["P"], _factor_dtype(x_RN.dtype), x_RN.device),
            out_RB,
            n,
            tiles,
            _stride(x_RN),
            _stride(out_RB),
            _seed(seed),
            DITHER=seed is not None,
            **shape,
            # for three bits the compiler aims at fewer registers by itself, and spills some of them
            maxnreg=_REGISTERS if format.bits == 3 and seed is not None else None,
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
            _matrix_of(format, shape["P"], torch.float16, out_RN.device),
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


def dequantize_reduce(
    payload_PRB: Tensor,
    format: Format,
    seed: int | None,
    skip: int | None,
    add_RN: Tensor | None,
    factor: float,
    out_RN: Tensor,
) -> None:
    """Write the sum over senders to `out`."""
    rows, n = out_RN.shape
    if rows == 0 or n == 0:
        return
    add_RN = _contiguous(add_RN)
    shape = geometry(format)
    tiles = -(-format.blocks(n) // shape["K"])
    with _device(out_RN):
        reduce_kernel[(rows * tiles,)](
            payload_PRB,
            add_RN,
            _matrix_of(format, shape["P"], torch.bfloat16, out_RN.device),
            out_RN,
            *_senders(payload_PRB, skip),
            float(factor),
            n,
            tiles,
            payload_PRB.stride(0),
            _stride(payload_PRB[0]),
            0 if add_RN is None else _stride(add_RN),
            _stride(out_RN),
            _seed(seed),
            DITHER=seed is not None,
            **shape,
            maxnreg=_ALL_REGISTERS if format.rotated else None,
            **_OPTIONS,
        )


def dequantize_reduce_quantize(
    payload_PRB: Tensor,
    format: Format,
    n: int,
    to: Format,
    seed: int | None,
    skip: int | None,
    add_RN: Tensor | None,
    factor: float,
    to_seed: int | None,
    order: Sequence[int] | None,
    out_RB: Tensor,
) -> None:
    """Write the payloads of the sums over senders to `out`. Both formats have the same block."""
    rows = out_RB.shape[0]
    if rows == 0 or n == 0:
        return
    add_RN = _contiguous(add_RN)
    shape = geometry(format, to)
    shape |= {"TO_BITS": to.bits, "TO_ROTATED": to.rotated, "TO_DITHER": to_seed is not None}
    tiles = -(-format.blocks(n) // shape["K"])
    with _device(out_RB):
        requantize_kernel[(rows * tiles,)](
            payload_PRB,
            add_RN,
            None if order is None else _order(tuple(order), payload_PRB.shape[1], out_RB.device),
            _matrix_of(format, shape["P"], torch.bfloat16, out_RB.device),
            _scaled_matrix(to, shape["P"], torch.bfloat16, out_RB.device),
            out_RB,
            *_senders(payload_PRB, skip),
            float(factor),
            n,
            tiles,
            payload_PRB.stride(0),
            _stride(payload_PRB[0]),
            0 if add_RN is None else _stride(add_RN),
            _stride(out_RB),
            _seed(seed),
            _seed(to_seed),
            DITHER=seed is not None,
            **shape,
            **_OPTIONS,
        )


_INTERPRETED = triton.knobs.runtime.interpret
_OPTIONS: dict[str, Any] = {"INTERPRETED": _INTERPRETED, "num_warps": WARPS, "enable_fp_fusion": False}


def geometry(format: Format, to: Format | None = None) -> dict[str, Any]:
    """The constants of a format: a tile is K blocks of P parts, as both formats need them where there is a second."""
    count, parts = _tile(*(format,) if to is None else (format, to))
    return {"BITS": format.bits, "ROTATED": format.rotated, "BLOCK": format.block, "K": count, "P": parts}


@cache
def _tile(*formats: Format) -> tuple[int, int]:
    block = formats[0].block
    parts = max(8 // min(format.planes) for format in formats)
    if not any(format.rotated for format in formats):
        return max(1, max(_BYTES * parts, _FEWEST) // block), parts
    # small matrices: sums and differences across parts cost less than a large one in every program
    parts = min(8, max(parts, block // 32))
    return max(_LEAST_ROWS, min(64, _ELEMENTS // block)), parts


@cache
def _matrix_of(format: Format, parts: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Hadamard's matrix that rotates a part."""
    return blocks.hadamard(format.block // parts, device).to(dtype) if format.rotated else None


@cache
def _scaled_matrix(format: Format, parts: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """The same, over the block's size: no sum of a block's numbers overflows."""
    matrix = _matrix_of(format, parts, torch.float32, device)
    return None if matrix is None else (matrix / format.block).to(dtype)


def _senders(payload_PRB: Tensor, skip: int | None) -> tuple[int, int]:
    """(how many are read, which one is not): their number where all are."""
    senders = payload_PRB.shape[0]
    return (senders, senders) if skip is None else (senders - 1, skip)


def _contiguous(x_RN: Tensor | None) -> Tensor | None:
    """With elements of a row one after the other."""
    return x_RN if x_RN is None or x_RN.stride(1) == 1 else x_RN.contiguous()


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

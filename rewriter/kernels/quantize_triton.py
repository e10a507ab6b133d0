"""Launches of the kernels of `rows_triton`: tiles, and small tensors that kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from rewriter.kernels import blocks
from rewriter.kernels.blocks_triton import Tile
from rewriter.kernels.devices import current_device
from rewriter.kernels.formats import Format
from rewriter.kernels.rows_triton import dequantize_kernel, quantize_kernel, sum_kernel

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
    tile = tile_of(format, dithered=seed is not None)
    tiles = -(-format.blocks(n) // tile.K)
    with current_device(x_RN):
        quantize_kernel[(rows * tiles,)](
            x_RN,
            _order(order, x_RN.shape[0], x_RN.device),
            _matrices(tile, _factor_dtype(x_RN.dtype), x_RN.device),
            out_RB,
            n,
            tiles,
            _stride(x_RN),
            _stride(out_RB),
            _seed(seed),
            T=tile,
            # for three bits the compiler aims at fewer registers by itself, and spills some of them
            maxnreg=_REGISTERS if format.bits == 3 and seed is not None else None,
            **_OPTIONS,
        )


def dequantize_rows(payload_RB: Tensor, format: Format, n: int, seed: int | None, out_RN: Tensor) -> None:
    """Write what rows of payloads stand for to `out`."""
    rows = out_RN.shape[0]
    if rows == 0 or n == 0:
        return
    tile = tile_of(format, dithered=seed is not None)
    tiles = -(-format.blocks(n) // tile.K)
    with current_device(out_RN):
        dequantize_kernel[(rows * tiles,)](
            payload_RB,
            _matrix_and_signs(tile, torch.float16, out_RN.device),
            out_RN,
            n,
            tiles,
            _stride(payload_RB),
            _stride(out_RN),
            _seed(seed),
            T=tile,
            FINITE=torch.finfo(out_RN.dtype).max,
            **_OPTIONS,
        )


def dequantize_reduce(
    payload_PRB: Tensor,
    format: Format,
    n: int,
    seed: int | None,
    skip: int | None,
    add_RN: Tensor | None,
    factor: float,
    out: Tensor,
    *,
    to: Format | None = None,
    to_seed: int | None = None,
    order: Sequence[int] | None = None,
) -> None:
    """Write the sum over senders to `out` [R, N]; with `to`, of the same block, the payloads of its rows in `order`."""
    rows = out.shape[0]
    if rows == 0 or n == 0:
        return
    if add_RN is not None and add_RN.stride(1) != 1:
        add_RN = add_RN.contiguous()
    senders = payload_PRB.shape[0]
    tile = tile_of(format, to, seed is not None)
    to_tile = None if to is None else replace(tile, format=to, dithered=to_seed is not None)
    tiles = -(-format.blocks(n) // tile.K)
    with current_device(out):
        sum_kernel[(rows * tiles,)](
            payload_PRB,
            add_RN,
            _order(order, payload_PRB.shape[1], out.device),
            _matrix_and_signs(tile, torch.bfloat16, out.device),
            None if to_tile is None else _matrices(to_tile, torch.bfloat16, out.device),
            out,
            senders if skip is None else senders - 1,
            senders if skip is None else skip,
            float(factor),
            n,
            tiles,
            payload_PRB.stride(0),
            _stride(payload_PRB[0]),
            0 if add_RN is None else _stride(add_RN),
            _stride(out),
            _seed(seed),
            None if to is None else _seed(to_seed),
            T=tile,
            TO=to_tile,
            maxnreg=_ALL_REGISTERS if format.rotated and to is None else None,
            **_OPTIONS,
        )


_OPTIONS: dict[str, Any] = {"num_warps": WARPS, "enable_fp_fusion": False}
_CPU = torch.device("cpu")


@cache
def tile_of(format: Format, to: Format | None = None, dithered: bool = False) -> Tile:
    """The constants of a kernel for `format`: K blocks of P parts that serve `to` as well."""
    formats = (format,) if to is None else (format, to)
    # two even where a byte holds one code: fewer threads of a block exchange its largest number
    parts = max(2, *(8 // min(some.planes) for some in formats))
    if not any(some.rotated for some in formats):
        return Tile(format, max(1, max(_BYTES * parts, _FEWEST) // format.block), parts, dithered)
    # small matrices: sums and differences across parts cost less than a large one in every program
    parts = min(8, max(parts, format.block // 32))
    return Tile(format, max(_LEAST_ROWS, min(64, _ELEMENTS // format.block)), parts, dithered)


@cache
def _matrices(tile: Tile, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """[P, W, W] that rotate parts: S H over the block's size, with which no sum of a block's numbers overflows."""
    if not tile.format.rotated:
        return None
    matrix, signs = _hadamard(tile)
    return (signs[:, :, None] * matrix / tile.format.block).to(dtype).to(device)


@cache
def _matrix_and_signs(tile: Tile, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """[W + P, W] that rotate parts back: H, then S."""
    return torch.cat(_hadamard(tile)).to(dtype).to(device) if tile.format.rotated else None


def _hadamard(tile: Tile) -> tuple[Tensor, Tensor]:
    """H [W, W] of a part and S [P, W] of a block, made on the CPU: a copy from there is done when it is returned. A
    kernel would run on the first user's stream, and users on other streams would not wait for it."""
    return blocks.hadamard(tile.width, _CPU), blocks.signs(tile.format.block, _CPU).view(tile.P, tile.width)


def _order(order: Sequence[int] | None, rows: int, device: torch.device) -> Tensor | None:
    return None if order is None else _indices(tuple(order), rows, device)


@lru_cache(256)
def _indices(order: tuple[int, ...], rows: int, device: torch.device) -> Tensor:
    """As indices of rows; raises IndexError as indexing does."""
    return torch.arange(rows, dtype=torch.int32)[list(order)].to(device)


def _factor_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the matrix for numbers of `dtype`; fp32 ones are multiplied as three of bf16."""
    return torch.bfloat16 if dtype == torch.float32 else dtype


def _stride(x_RN: Tensor) -> int:
    """Between rows; 0 where there is one, so that no length compiles another kernel."""
    return x_RN.stride(0) if x_RN.shape[0] > 1 else 0


def _seed(seed: int | None) -> int:
    """32 bits with a sign, which is one type of argument for all seeds."""
    return ((seed or 0) + (1 << 31)) % (1 << 32) - (1 << 31)

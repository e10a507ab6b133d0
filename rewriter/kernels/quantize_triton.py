"""The kernels of `rewriter.kernels.quantize`. Limited by memory: each reads its input once and writes its result once.

A program does a tile of K blocks of one row. Those that the row fills do it without masks, so that accesses are of 16
bytes at any length; the last one has masks. Rows and tiles are addressed with 64 bits, elements of a tile with
32. Sizes, seeds and senders are run-time arguments: one compilation serves all tensors of a dtype and format, apart
from strides that are not multiples of 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rewriter.kernels import blocks
from rewriter.kernels.blocks_triton import (
    Tile,
    block_starts,
    decode_scales,
    encode,
    levels,
    load,
    load_codes,
    rotate,
    scales_of,
    signed,
    store,
    store_codes,
)
from rewriter.kernels.devices import current_device
from rewriter.kernels.formats import Format

WARPS = 4
_ALL_REGISTERS = 255  # of a thread: rotated sums spill where the compiler aims at fewer
_REGISTERS = 168  # of a thread, so that three programs fit on a multiprocessor
_BYTES = 16 * 32 * WARPS  # of a plane's run in a tile: what its threads store at once
_FEWEST = 32 * 32 * WARPS  # elements of a tile: that many for a thread that its addresses and scales do not cost much
_LEAST_ROWS = 16  # of a product of matrices
_ELEMENTS = 8192  # of a tile whose blocks are rotated


@triton.jit
def places(p: tl.constexpr, T: tl.constexpr):
    """[K, W]: which element of the tile is each of part p."""
    K: tl.constexpr = T.K
    W: tl.constexpr = T.width
    block: tl.constexpr = T.format.block
    return tl.arange(0, K)[:, None] * block + tl.arange(0, W)[None, :] + p * W


@triton.jit
def load_parts(x, left, T: tl.constexpr, FULL: tl.constexpr):
    """P tensors [K, W] from K consecutive blocks, of which `left` elements are there; zeros stand for the others."""
    P: tl.constexpr = T.P
    parts = ()
    for p in tl.static_range(P):
        at = places(p, T)
        parts = parts + (load(x + at, at < left, FULL),)
    return parts


@triton.jit
def store_parts(out, parts, left, T: tl.constexpr, FULL: tl.constexpr):
    P: tl.constexpr = T.P
    for p in tl.static_range(P):
        at = places(p, T)
        store(out + at, parts[p].to(out.dtype.element_ty), at < left, FULL)


@triton.jit
def store_payload(row, codes, scales, first, count, T: tl.constexpr, FULL: tl.constexpr):
    """Codes and scales of a tile, and, after the last scale, zeros up to a multiple of 16 bytes."""
    K: tl.constexpr = T.K
    left = (count - first).to(tl.int32)
    store_codes(row, codes, scales, first, count, left, T, FULL)
    k = tl.arange(0, K)
    store(scales_of(row, first, count, T) + k, scales.to(tl.uint16), k < left, FULL)
    if first + K >= count:
        used = count * (T.format.block_bytes + 2)
        rest = tl.arange(0, 16)
        tl.store(row + used + rest, tl.zeros((16,), tl.uint8), mask=rest < (16 - used % 16) % 16)


@triton.jit
def load_payload(row, first, count, seed, T: tl.constexpr, FULL: tl.constexpr):
    """Levels of a tile, P tensors fp32 [K, W] before the rotation back, and scales [K] fp32."""
    K: tl.constexpr = T.K
    left = (count - first).to(tl.int32)
    starts = None
    if T.dithered:
        starts = block_starts(first, seed, T)
    codes = load_codes(row, first, count, left, T, FULL)
    k = tl.arange(0, K)
    scales = load(scales_of(row, first, count, T) + k, k < left, FULL)
    return levels(codes, starts, T), decode_scales(scales)


@triton.jit
def _quantize_tile(x, row, h, n, first, seed, T: tl.constexpr, FULL: tl.constexpr):
    start = first * T.format.block
    parts = load_parts(x + start, (n - start).to(tl.int32), T, FULL)
    codes, scales = encode(parts, h, first, seed, T)
    store_payload(row, codes, scales, first, tl.cdiv(n, T.format.block), T, FULL)


@triton.jit(do_not_specialize=["n", "tiles", "seed"])
def quantize_kernel(
    x,  # [R, N], rows of any stride
    order,  # [rows] int32 or None: which row of x each program reads
    h,  # of `rotate`, or None
    payload,  # bytes [rows, B]
    n,
    tiles,  # of a row
    x_stride,
    payload_stride,
    seed,
    T: tl.constexpr,
):
    row = tl.program_id(0) // tiles
    first = (tl.program_id(0) % tiles).to(tl.int64) * T.K
    source = row
    if order is not None:
        source = tl.load(order + row)
    x += source.to(tl.int64) * x_stride
    payload += row.to(tl.int64) * payload_stride
    n = n.to(tl.int64)
    if (first + T.K) * T.format.block <= n:
        _quantize_tile(x, payload, h, n, first, seed, T, True)
    else:
        _quantize_tile(x, payload, h, n, first, seed, T, False)


@triton.jit
def _dequantize_tile(row, h, out, n, first, seed, T: tl.constexpr, FINITE: tl.constexpr, FULL: tl.constexpr):
    P: tl.constexpr = T.P
    x, scales = load_payload(row, first, tl.cdiv(n, T.format.block), seed, T, FULL)
    if T.format.rotated:
        exact = ()
        for p in tl.static_range(P):
            exact = exact + (x[p].to(tl.float16),)
        x = rotate(exact, h, T, True)
    values = ()
    for p in tl.static_range(P):
        value = tl.clamp(x[p] * scales[:, None], -FINITE, FINITE, propagate_nan=tl.PropagateNan.ALL)
        values = values + (value.to(out.dtype.element_ty),)
    if T.format.rotated:
        values = signed(values, h, T)
    start = first * T.format.block
    store_parts(out + start, values, (n - start).to(tl.int32), T, FULL)


@triton.jit(do_not_specialize=["n", "tiles", "seed"])
def dequantize_kernel(
    payload,  # bytes [R, B]
    h,  # of `rotate` BACK in fp16, or None
    out,  # [R, N]
    n,
    tiles,
    payload_stride,
    out_stride,
    seed,  # of row 0; row r used seed + r
    T: tl.constexpr,
    FINITE: tl.constexpr,
):
    row = tl.program_id(0) // tiles
    first = (tl.program_id(0) % tiles).to(tl.int64) * T.K
    payload += row.to(tl.int64) * payload_stride
    out += row.to(tl.int64) * out_stride
    n = n.to(tl.int64)
    seed += row
    if (first + T.K) * T.format.block <= n:
        _dequantize_tile(payload, h, out, n, first, seed, T, FINITE, True)
    else:
        _dequantize_tile(payload, h, out, n, first, seed, T, FINITE, False)


# --- sums of what ranks sent: to numbers, or to payloads again ---


@triton.jit
def _summed(payload, sender_stride, senders, skip, add, factor, h, n, first, seed, T: tl.constexpr, FULL: tl.constexpr):
    """P tensors fp32 [K, W]: the sum of what senders sent, as the specification adds it up. `payload` and `add` are the
    row of sender 0 and that of the exact part."""
    K: tl.constexpr = T.K
    P: tl.constexpr = T.P
    W: tl.constexpr = T.width
    count = tl.cdiv(n, T.format.block)
    total = ()
    for _p in tl.static_range(P):
        total = total + (tl.zeros((K, W), tl.float32),)
    i = 0
    while i < senders:  # the interpreter of Triton 3.6 has no range of a run-time number
        sender = i + (i >= skip).to(tl.int32)
        x, scales = load_payload(payload + sender.to(tl.int64) * sender_stride, first, count, seed + sender, T, FULL)
        more = ()
        for p in tl.static_range(P):
            more = more + (tl.fma(x[p], scales[:, None], total[p]),)  # the product is exact
        total = more
        i += 1
    if T.format.rotated:
        total = signed(rotate(total, h, T, True), h, T)
    start = first * T.format.block
    if add is not None:
        own = load_parts(add + start, (n - start).to(tl.int32), T, FULL)
        more = ()
        for p in tl.static_range(P):
            more = more + (total[p] + own[p].to(tl.float32),)
        total = more
    scaled = ()
    for p in tl.static_range(P):
        scaled = scaled + (total[p] * factor,)
    return scaled


@triton.jit
def _sum_tile(
    payload, sender_stride, senders, skip, add, factor, h, h_to, out, n, first, seed, to_seed, T: tl.constexpr,
    TO: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    P: tl.constexpr = T.P
    total = _summed(payload, sender_stride, senders, skip, add, factor, h, n, first, seed, T, FULL)
    start = first * T.format.block
    left = (n - start).to(tl.int32)
    if TO is None:
        store_parts(out + start, total, left, T, FULL)
    else:
        if not FULL:
            # what the last block is padded with is not always zero after it was decoded
            padded = ()
            for p in tl.static_range(P):
                padded = padded + (tl.where(places(p, T) < left, total[p], 0.0),)
            total = padded
        codes, scales = encode(total, h_to, first, to_seed, TO)
        store_payload(out, codes, scales, first, tl.cdiv(n, T.format.block), TO, FULL)


@triton.jit(do_not_specialize=["senders", "skip", "n", "tiles", "seed", "to_seed"])
def sum_kernel(
    payload,  # bytes [P, R, B]
    add,  # [R, N] or None
    order,  # [rows] int32 or None: which row each program sums
    h,  # of `rotate` BACK in bf16, or None
    h_to,  # of `rotate` in bf16, or None
    out,  # [rows, N], or bytes [rows, B']
    senders,  # that are read
    skip,  # the one that is not, or the number of all
    factor,
    n,
    tiles,
    sender_stride,
    row_stride,
    add_stride,
    out_stride,
    seed,  # of sender 0; sender p used seed + p
    to_seed,
    T: tl.constexpr,
    TO: tl.constexpr,  # what the sum is quantized to, or None; its K and P are those of T
):
    row = tl.program_id(0) // tiles
    first = (tl.program_id(0) % tiles).to(tl.int64) * T.K
    out += row.to(tl.int64) * out_stride
    source = row
    if order is not None:
        source = tl.load(order + row)
    payload += source.to(tl.int64) * row_stride
    if add is not None:
        add += source.to(tl.int64) * add_stride
    n = n.to(tl.int64)
    if (first + T.K) * T.format.block <= n:
        _sum_tile(
            payload, sender_stride, senders, skip, add, factor, h, h_to, out, n, first, seed, to_seed, T, TO, True
        )
    else:
        _sum_tile(
            payload, sender_stride, senders, skip, add, factor, h, h_to, out, n, first, seed, to_seed, T, TO, False
        )


# --- launches ---


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
    """The dtype of the matrix for numbers of `dtype`; fp32 ones are multiplied as three of bf16."""
    return torch.bfloat16 if dtype == torch.float32 else dtype


def _stride(x_RN: Tensor) -> int:
    """Between rows; 0 where there is one, so that no length compiles another kernel."""
    return x_RN.stride(0) if x_RN.shape[0] > 1 else 0


def _seed(seed: int | None) -> int:
    """32 bits with a sign, which is one type of argument for all seeds."""
    return ((seed or 0) + (1 << 31)) % (1 << 32) - (1 << 31)

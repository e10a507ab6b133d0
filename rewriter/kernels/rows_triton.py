"""The kernels of `rewriter.kernels.quantize`. Limited by memory: each reads its input once and writes its result once.

A program does a tile of K blocks of one row. Those that the row fills do it without masks, so that accesses are of 16
bytes at any length; the last one has masks. Rows and tiles are addressed with 64 bits, elements of a tile with
32. Sizes, seeds and senders are run-time arguments: one compilation serves all tensors of a dtype and format, apart
from strides that are not multiples of 16.
"""

import triton
import triton.language as tl

from rewriter.kernels.blocks_triton import (
    block_starts,
    decode_scales,
    encode,
    levels,
    load_codes,
    rotate_back,
    scales_of,
    signed,
    store_codes,
)


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
        if FULL:
            parts = parts + (tl.load(x + at),)
        else:
            parts = parts + (tl.load(x + at, mask=at < left, other=0.0),)
    return parts


@triton.jit
def store_parts(out, parts, left, T: tl.constexpr, FULL: tl.constexpr):
    P: tl.constexpr = T.P
    for p in tl.static_range(P):
        at = places(p, T)
        value = parts[p].to(out.dtype.element_ty)
        if FULL:
            tl.store(out + at, value)
        else:
            tl.store(out + at, value, mask=at < left)


@triton.jit
def store_payload(row, codes, scales, first, count, T: tl.constexpr, FULL: tl.constexpr):
    """Codes and scales of a tile, and, after the last scale, zeros up to a multiple of 16 bytes."""
    K: tl.constexpr = T.K
    left = (count - first).to(tl.int32)
    store_codes(row, codes, scales, first, count, left, T, FULL)
    k = tl.arange(0, K)
    at = scales_of(row, first, count, T) + k
    if FULL:
        tl.store(at, scales.to(tl.uint16))
    else:
        tl.store(at, scales.to(tl.uint16), mask=k < left)
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
    at = scales_of(row, first, count, T) + k
    if FULL:
        scales = tl.load(at)
    else:
        scales = tl.load(at, mask=k < left, other=0)
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
        x = rotate_back(exact, h, T)
    found = ()
    for p in tl.static_range(P):
        value = tl.clamp(x[p] * scales[:, None], -FINITE, FINITE, propagate_nan=tl.PropagateNan.ALL)
        found = found + (value.to(out.dtype.element_ty),)
    if T.format.rotated:
        found = signed(found, h, T)
    start = first * T.format.block
    store_parts(out + start, found, (n - start).to(tl.int32), T, FULL)


@triton.jit(do_not_specialize=["n", "tiles", "seed"])
def dequantize_kernel(
    payload,  # bytes [R, B]
    h,  # of `rotate_back` in fp16, or None
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

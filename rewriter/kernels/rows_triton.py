"""The kernels of `rewriter.kernels.quantize`. Limited by memory: each reads its input once and writes its result once.

A program does a tile of K blocks of one row. Those that the row fills do it without masks, so that accesses are of 16
bytes whatever its length; the last one has masks. Rows and tiles are addressed with 64 bits, elements of a tile with
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
    rotate,
    scales_of,
    signed,
    store_codes,
)


@triton.jit
def load_parts(x, left, BLOCK: tl.constexpr, K: tl.constexpr, P: tl.constexpr, FULL: tl.constexpr):
    """P tensors [K, W] from K consecutive blocks, of which `left` elements are there; zeros stand for the others."""
    W: tl.constexpr = BLOCK // P
    at = tl.arange(0, K)[:, None] * BLOCK + tl.arange(0, W)[None, :]
    parts = ()
    for p in tl.static_range(P):
        if FULL:
            parts = parts + (tl.load(x + (at + p * W)),)
        else:
            parts = parts + (tl.load(x + (at + p * W), mask=at + p * W < left, other=0.0),)
    return parts


@triton.jit
def store_parts(out, parts, left, BLOCK: tl.constexpr, P: tl.constexpr, FULL: tl.constexpr):
    K: tl.constexpr = parts[0].shape[0]
    W: tl.constexpr = BLOCK // P
    at = tl.arange(0, K)[:, None] * BLOCK + tl.arange(0, W)[None, :]
    for p in tl.static_range(P):
        value = parts[p].to(out.dtype.element_ty)
        if FULL:
            tl.store(out + (at + p * W), value)
        else:
            tl.store(out + (at + p * W), value, mask=at + p * W < left)


@triton.jit
def load_matrix(h, W: tl.constexpr):
    return tl.load(h + tl.arange(0, W)[:, None] * W + tl.arange(0, W)[None, :])


@triton.jit
def store_payload(
    row, codes, scales, first, count, left, BITS: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr, FULL: tl.constexpr
):
    """Codes and scales of a tile, and, behind the last scale, zeros up to a multiple of 16 bytes."""
    K: tl.constexpr = codes[0].shape[0]
    store_codes(row, codes, first, count, left, BITS, BLOCK, P, FULL)
    k = tl.arange(0, K)
    at = scales_of(row, first, count, BITS, BLOCK) + k
    if FULL:
        tl.store(at, scales.to(tl.uint16))
    else:
        tl.store(at, scales.to(tl.uint16), mask=k < left)
    if first + K >= count:
        used = count * (BLOCK * BITS // 8 + 2)
        rest = tl.arange(0, 16)
        tl.store(row + used + rest, tl.zeros((16,), tl.uint8), mask=rest < (16 - used % 16) % 16)


@triton.jit
def load_scales(row, first, count, left, BITS: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr, FULL: tl.constexpr):
    """[K] fp32."""
    k = tl.arange(0, K)
    at = scales_of(row, first, count, BITS, BLOCK) + k
    if FULL:
        return decode_scales(tl.load(at))
    return decode_scales(tl.load(at, mask=k < left, other=0))


@triton.jit
def _quantize_tile(
    x, row, h, n, first, seed, BITS: tl.constexpr, ROTATED: tl.constexpr, DITHER: tl.constexpr, BLOCK: tl.constexpr,
    K: tl.constexpr, P: tl.constexpr, INTERPRETED: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    count = tl.cdiv(n, BLOCK)
    start = first * BLOCK
    matrix = None
    if ROTATED:
        matrix = load_matrix(h, BLOCK // P)
    parts = load_parts(x + start, (n - start).to(tl.int32), BLOCK, K, P, FULL)
    codes, scales = encode(parts, matrix, first, seed, BITS, ROTATED, DITHER, P, INTERPRETED)
    store_payload(row, codes, scales, first, count, (count - first).to(tl.int32), BITS, BLOCK, P, FULL)


@triton.jit(do_not_specialize=["n", "tiles", "seed"])
def quantize_kernel(
    x,  # [R, N], rows of any stride
    order,  # [rows] int32 or None: which row of x each program reads
    h,  # [W, W] ±1/block, or None
    payload,  # bytes [rows, B]
    n,
    tiles,  # of a row
    x_stride,
    payload_stride,
    seed,
    BITS: tl.constexpr,
    ROTATED: tl.constexpr,
    DITHER: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    row = tl.program_id(0) // tiles
    first = (tl.program_id(0) % tiles).to(tl.int64) * K
    source = row
    if order is not None:
        source = tl.load(order + row)
    x += source.to(tl.int64) * x_stride
    payload += row.to(tl.int64) * payload_stride
    n = n.to(tl.int64)
    if (first + K) * BLOCK <= n:
        _quantize_tile(x, payload, h, n, first, seed, BITS, ROTATED, DITHER, BLOCK, K, P, INTERPRETED, True)
    else:
        _quantize_tile(x, payload, h, n, first, seed, BITS, ROTATED, DITHER, BLOCK, K, P, INTERPRETED, False)


@triton.jit
def _dequantize_tile(
    row, h, out, n, first, seed, BITS: tl.constexpr, ROTATED: tl.constexpr, DITHER: tl.constexpr, BLOCK: tl.constexpr,
    K: tl.constexpr, P: tl.constexpr, FINITE: tl.constexpr, INTERPRETED: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    count = tl.cdiv(n, BLOCK)
    left = (count - first).to(tl.int32)
    starts = None
    if DITHER:
        starts = block_starts(first, seed, K)
    codes = load_codes(row, first, count, left, BITS, BLOCK, K, P, FULL)
    scales = load_scales(row, first, count, left, BITS, BLOCK, K, FULL)
    x = levels(codes, starts, BITS, ROTATED, DITHER, P)
    if ROTATED:
        # levels have at most 11 bits
        exact = ()
        for p in tl.static_range(P):
            exact = exact + (x[p].to(tl.float16),)
        x = signed(rotate(exact, load_matrix(h, BLOCK // P), P, INTERPRETED), P)
    found = ()
    for p in tl.static_range(P):
        value = x[p] * scales[:, None]
        found = found + (tl.clamp(value, -FINITE, FINITE, propagate_nan=tl.PropagateNan.ALL),)
    start = first * BLOCK
    store_parts(out + start, found, (n - start).to(tl.int32), BLOCK, P, FULL)


@triton.jit(do_not_specialize=["n", "tiles", "seed"])
def dequantize_kernel(
    payload,  # bytes [R, B]
    h,  # [W, W] ±1 in fp16, or None
    out,  # [R, N]
    n,
    tiles,
    payload_stride,
    out_stride,
    seed,  # of row 0; row r used seed + r
    BITS: tl.constexpr,
    ROTATED: tl.constexpr,
    DITHER: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    FINITE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    row = tl.program_id(0) // tiles
    first = (tl.program_id(0) % tiles).to(tl.int64) * K
    payload += row.to(tl.int64) * payload_stride
    out += row.to(tl.int64) * out_stride
    n = n.to(tl.int64)
    seed += row
    if (first + K) * BLOCK <= n:
        _dequantize_tile(payload, h, out, n, first, seed, BITS, ROTATED, DITHER, BLOCK, K, P, FINITE, INTERPRETED, True)
    else:
        _dequantize_tile(
            payload, h, out, n, first, seed, BITS, ROTATED, DITHER, BLOCK, K, P, FINITE, INTERPRETED, False
        )

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
        total = signed(rotate_back(total, h, T), h, T)
    start = first * T.format.block
    if add is not None:
        own = load_parts(add + start, (n - start).to(tl.int32), T, FULL)
        more = ()
        for p in tl.static_range(P):
            more = more + (total[p] + own[p].to(tl.float32),)
        total = more
    found = ()
    for p in tl.static_range(P):
        found = found + (total[p] * factor,)
    return found


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
    h,  # of `rotate_back` in bf16, or None
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

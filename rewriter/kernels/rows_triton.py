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
def _load_parts(x, left, BLOCK: tl.constexpr, K: tl.constexpr, P: tl.constexpr, FULL: tl.constexpr):
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
def _store_parts(out, parts, left, BLOCK: tl.constexpr, P: tl.constexpr, FULL: tl.constexpr):
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
def _matrix(h, W: tl.constexpr):
    return tl.load(h + tl.arange(0, W)[:, None] * W + tl.arange(0, W)[None, :])


@triton.jit
def _store_payload(
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
def _load_scales(row, first, count, left, BITS: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr, FULL: tl.constexpr):
    """[K] fp32."""
    k = tl.arange(0, K)
    at = scales_of(row, first, count, BITS, BLOCK) + k
    if FULL:
        return decode_scales(tl.load(at))
    return decode_scales(tl.load(at, mask=k < left, other=0))


@triton.jit
def _quantize_tile(
    x,
    row,
    h,
    n,
    first,
    seed,
    BITS: tl.constexpr,
    ROTATED: tl.constexpr,
    DITHER: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    INTERPRETED: tl.constexpr,
    FULL: tl.constexpr,
):
    count = tl.cdiv(n, BLOCK)
    start = first * BLOCK
    matrix = None
    if ROTATED:
        matrix = _matrix(h, BLOCK // P)
    parts = _load_parts(x + start, (n - start).to(tl.int32), BLOCK, K, P, FULL)
    codes, scales = encode(parts, matrix, first, seed, BITS, ROTATED, DITHER, P, INTERPRETED)
    _store_payload(row, codes, scales, first, count, (count - first).to(tl.int32), BITS, BLOCK, P, FULL)


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
    row,
    h,
    out,
    n,
    first,
    seed,
    BITS: tl.constexpr,
    ROTATED: tl.constexpr,
    DITHER: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    FINITE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    FULL: tl.constexpr,
):
    count = tl.cdiv(n, BLOCK)
    left = (count - first).to(tl.int32)
    starts = None
    if DITHER:
        starts = block_starts(first, seed, K)
    codes = load_codes(row, first, count, left, BITS, BLOCK, K, P, FULL)
    scales = _load_scales(row, first, count, left, BITS, BLOCK, K, FULL)
    x = levels(codes, starts, BITS, ROTATED, DITHER, P)
    if ROTATED:
        # levels have at most 11 bits
        exact = ()
        for p in tl.static_range(P):
            exact = exact + (x[p].to(tl.float16),)
        x = signed(rotate(exact, _matrix(h, BLOCK // P), P, INTERPRETED), P)
    found = ()
    for p in tl.static_range(P):
        value = x[p] * scales[:, None]
        found = found + (tl.clamp(value, -FINITE, FINITE, propagate_nan=tl.PropagateNan.ALL),)
    start = first * BLOCK
    _store_parts(out + start, found, (n - start).to(tl.int32), BLOCK, P, FULL)


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


@triton.jit
def _sum_tile(
    payload,
    sender_stride,
    senders,
    skip,
    add,
    factor,
    h,
    n,
    first,
    seed,
    BITS: tl.constexpr,
    ROTATED: tl.constexpr,
    DITHER: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    INTERPRETED: tl.constexpr,
    FULL: tl.constexpr,
):
    """P tensors fp32 [K, W]: the sum of what senders sent, as the specification adds it up. `payload` and `add` are the
    row of sender 0 and that of the exact part."""
    count = tl.cdiv(n, BLOCK)
    left = (count - first).to(tl.int32)
    total = ()
    for _p in tl.static_range(P):
        total = total + (tl.zeros((K, BLOCK // P), tl.float32),)
    i = 0
    while i < senders:  # the interpreter of Triton 3.6 has no range of a run-time number
        sender = i + (i >= skip).to(tl.int32)
        row = payload + sender.to(tl.int64) * sender_stride
        starts = None
        if DITHER:
            starts = block_starts(first, seed + sender, K)
        codes = load_codes(row, first, count, left, BITS, BLOCK, K, P, FULL)
        scales = _load_scales(row, first, count, left, BITS, BLOCK, K, FULL)
        x = levels(codes, starts, BITS, ROTATED, DITHER, P)
        more = ()
        for p in tl.static_range(P):
            more = more + (tl.fma(x[p], scales[:, None], total[p]),)  # the product is exact
        total = more
        i += 1
    if ROTATED:
        total = signed(rotate(total, _matrix(h, BLOCK // P), P, INTERPRETED), P)
    start = first * BLOCK
    if add is not None:
        own = _load_parts(add + start, (n - start).to(tl.int32), BLOCK, K, P, FULL)
        more = ()
        for p in tl.static_range(P):
            more = more + (total[p] + own[p].to(tl.float32),)
        total = more
    found = ()
    for p in tl.static_range(P):
        found = found + (total[p] * factor,)
    return found


@triton.jit
def _reduce_tile(
    payload,
    sender_stride,
    senders,
    skip,
    add,
    factor,
    h,
    out,
    n,
    first,
    seed,
    BITS: tl.constexpr,
    ROTATED: tl.constexpr,
    DITHER: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    INTERPRETED: tl.constexpr,
    FULL: tl.constexpr,
):
    total = _sum_tile(
        payload,
        sender_stride,
        senders,
        skip,
        add,
        factor,
        h,
        n,
        first,
        seed,
        BITS,
        ROTATED,
        DITHER,
        BLOCK,
        K,
        P,
        INTERPRETED,
        FULL,
    )
    start = first * BLOCK
    _store_parts(out + start, total, (n - start).to(tl.int32), BLOCK, P, FULL)


@triton.jit(do_not_specialize=["senders", "skip", "n", "tiles", "seed"])
def reduce_kernel(
    payload,  # bytes [P, R, B]
    add,  # [R, N] or None
    h,  # [W, W] ±1 in bf16, or None
    out,  # [R, N]
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
    BITS: tl.constexpr,
    ROTATED: tl.constexpr,
    DITHER: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    row = (tl.program_id(0) // tiles).to(tl.int64)
    first = (tl.program_id(0) % tiles).to(tl.int64) * K
    payload += row * row_stride
    out += row * out_stride
    if add is not None:
        add += row * add_stride
    n = n.to(tl.int64)
    if (first + K) * BLOCK <= n:
        _reduce_tile(
            payload,
            sender_stride,
            senders,
            skip,
            add,
            factor,
            h,
            out,
            n,
            first,
            seed,
            BITS,
            ROTATED,
            DITHER,
            BLOCK,
            K,
            P,
            INTERPRETED,
            True,
        )
    else:
        _reduce_tile(
            payload,
            sender_stride,
            senders,
            skip,
            add,
            factor,
            h,
            out,
            n,
            first,
            seed,
            BITS,
            ROTATED,
            DITHER,
            BLOCK,
            K,
            P,
            INTERPRETED,
            False,
        )


@triton.jit
def _requantize_tile(
    payload,
    sender_stride,
    senders,
    skip,
    add,
    factor,
    h,
    h_to,
    out,
    n,
    first,
    seed,
    to_seed,
    BITS: tl.constexpr,
    ROTATED: tl.constexpr,
    DITHER: tl.constexpr,
    TO_BITS: tl.constexpr,
    TO_ROTATED: tl.constexpr,
    TO_DITHER: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    INTERPRETED: tl.constexpr,
    FULL: tl.constexpr,
):
    total = _sum_tile(
        payload,
        sender_stride,
        senders,
        skip,
        add,
        factor,
        h,
        n,
        first,
        seed,
        BITS,
        ROTATED,
        DITHER,
        BLOCK,
        K,
        P,
        INTERPRETED,
        FULL,
    )
    count = tl.cdiv(n, BLOCK)
    if not FULL:
        # what the last block is padded with is not always zero after it was decoded
        left = (n - first * BLOCK).to(tl.int32)
        at = tl.arange(0, K)[:, None] * BLOCK + tl.arange(0, BLOCK // P)[None, :]
        padded = ()
        for p in tl.static_range(P):
            padded = padded + (tl.where(at + p * (BLOCK // P) < left, total[p], 0.0),)
        total = padded
    matrix = None
    if TO_ROTATED:
        matrix = _matrix(h_to, BLOCK // P)
    codes, scales = encode(total, matrix, first, to_seed, TO_BITS, TO_ROTATED, TO_DITHER, P, INTERPRETED)
    _store_payload(out, codes, scales, first, count, (count - first).to(tl.int32), TO_BITS, BLOCK, P, FULL)


@triton.jit(do_not_specialize=["senders", "skip", "n", "tiles", "seed", "to_seed"])
def requantize_kernel(
    payload,  # bytes [P, R, B]
    add,  # [R, N] or None
    order,  # [rows] int32 or None: which row each program sums
    h,  # [W, W] ±1 in bf16, or None
    h_to,  # ±1/block in bf16, or None
    out,  # bytes [rows, B']
    senders,
    skip,
    factor,
    n,
    tiles,
    sender_stride,
    row_stride,
    add_stride,
    out_stride,
    seed,
    to_seed,
    BITS: tl.constexpr,
    ROTATED: tl.constexpr,
    DITHER: tl.constexpr,
    TO_BITS: tl.constexpr,
    TO_ROTATED: tl.constexpr,
    TO_DITHER: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    row = tl.program_id(0) // tiles
    first = (tl.program_id(0) % tiles).to(tl.int64) * K
    out += row.to(tl.int64) * out_stride
    source = row
    if order is not None:
        source = tl.load(order + row)
    payload += source.to(tl.int64) * row_stride
    if add is not None:
        add += source.to(tl.int64) * add_stride
    n = n.to(tl.int64)
    if (first + K) * BLOCK <= n:
        _requantize_tile(
            payload,
            sender_stride,
            senders,
            skip,
            add,
            factor,
            h,
            h_to,
            out,
            n,
            first,
            seed,
            to_seed,
            BITS,
            ROTATED,
            DITHER,
            TO_BITS,
            TO_ROTATED,
            TO_DITHER,
            BLOCK,
            K,
            P,
            INTERPRETED,
            True,
        )
    else:
        _requantize_tile(
            payload,
            sender_stride,
            senders,
            skip,
            add,
            factor,
            h,
            h_to,
            out,
            n,
            first,
            seed,
            to_seed,
            BITS,
            ROTATED,
            DITHER,
            TO_BITS,
            TO_ROTATED,
            TO_DITHER,
            BLOCK,
            K,
            P,
            INTERPRETED,
            False,
        )

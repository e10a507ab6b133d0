"""Kernels that sum what ranks sent in payloads: to numbers, or to payloads again. Each reads its input once.

As in `rewriter.kernels.rows_triton`, a program does a tile of K blocks of one row.
"""

import triton
import triton.language as tl

from rewriter.kernels.blocks_triton import block_starts, encode, levels, load_codes, rotate, signed
from rewriter.kernels.rows_triton import load_matrix, load_parts, load_scales, store_parts, store_payload


@triton.jit
def _sum_tile(
    payload, sender_stride, senders, skip, add, factor, h, n, first, seed, BITS: tl.constexpr, ROTATED: tl.constexpr,
    DITHER: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr, P: tl.constexpr, INTERPRETED: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
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
        scales = load_scales(row, first, count, left, BITS, BLOCK, K, FULL)
        x = levels(codes, starts, BITS, ROTATED, DITHER, P)
        more = ()
        for p in tl.static_range(P):
            more = more + (tl.fma(x[p], scales[:, None], total[p]),)  # the product is exact
        total = more
        i += 1
    if ROTATED:
        total = signed(rotate(total, load_matrix(h, BLOCK // P), P, INTERPRETED), P)
    start = first * BLOCK
    if add is not None:
        own = load_parts(add + start, (n - start).to(tl.int32), BLOCK, K, P, FULL)
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
    payload, sender_stride, senders, skip, add, factor, h, out, n, first, seed, BITS: tl.constexpr,
    ROTATED: tl.constexpr, DITHER: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr, P: tl.constexpr,
    INTERPRETED: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    total = _sum_tile(
        payload, sender_stride, senders, skip, add, factor, h, n, first, seed, BITS, ROTATED, DITHER, BLOCK, K, P,
        INTERPRETED, FULL,
    )  # fmt: skip
    start = first * BLOCK
    store_parts(out + start, total, (n - start).to(tl.int32), BLOCK, P, FULL)


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
            payload, sender_stride, senders, skip, add, factor, h, out, n, first, seed, BITS, ROTATED, DITHER, BLOCK, K,
            P, INTERPRETED, True,
        )  # fmt: skip
    else:
        _reduce_tile(
            payload, sender_stride, senders, skip, add, factor, h, out, n, first, seed, BITS, ROTATED, DITHER, BLOCK, K,
            P, INTERPRETED, False,
        )  # fmt: skip


@triton.jit
def _requantize_tile(
    payload, sender_stride, senders, skip, add, factor, h, h_to, out, n, first, seed, to_seed, BITS: tl.constexpr,
    ROTATED: tl.constexpr, DITHER: tl.constexpr, TO_BITS: tl.constexpr, TO_ROTATED: tl.constexpr,
    TO_DITHER: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr, P: tl.constexpr, INTERPRETED: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    total = _sum_tile(
        payload, sender_stride, senders, skip, add, factor, h, n, first, seed, BITS, ROTATED, DITHER, BLOCK, K, P,
        INTERPRETED, FULL,
    )  # fmt: skip
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
        matrix = load_matrix(h_to, BLOCK // P)
    codes, scales = encode(total, matrix, first, to_seed, TO_BITS, TO_ROTATED, TO_DITHER, P, INTERPRETED)
    store_payload(out, codes, scales, first, count, (count - first).to(tl.int32), TO_BITS, BLOCK, P, FULL)


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
            payload, sender_stride, senders, skip, add, factor, h, h_to, out, n, first, seed, to_seed, BITS, ROTATED,
            DITHER, TO_BITS, TO_ROTATED, TO_DITHER, BLOCK, K, P, INTERPRETED, True,
        )  # fmt: skip
    else:
        _requantize_tile(
            payload, sender_stride, senders, skip, add, factor, h, h_to, out, n, first, seed, to_seed, BITS, ROTATED,
            DITHER, TO_BITS, TO_ROTATED, TO_DITHER, BLOCK, K, P, INTERPRETED, False,
        )  # fmt: skip

"""Kernels that sum what ranks sent in payloads: to numbers, or to payloads again. Each reads its input once.

As in `rewriter.kernels.rows_triton`, a program does a tile of K blocks of one row.
"""

import triton
import triton.language as tl

from rewriter.kernels.blocks_triton import encode, rotate_back, signed
from rewriter.kernels.rows_triton import load_parts, load_payload, places, store_parts, store_payload


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

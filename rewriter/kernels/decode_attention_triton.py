"""The kernels of `rewriter.kernels.decode_attention`: parts of the keys, and their merge.

Limited by memory: a key and value of size D and E cost (D + E) · e bytes, e those of the dtype, read once for up to 16
query heads of their group, which are rows of one tile. Which keys there are is read from memory by each program, and
all programs share them evenly at any position: a launch is the same for every token.

A second launch merges the parts. The last program to arrive could, without one, but needs a counter in memory that is
zero before, and atomics whose order only a GPU can test.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from rewriter.kernels.devices import current_device

WARPS = 4
STAGES = 3  # tiles of keys and values that are loaded ahead
TILE = 16384  # bytes of a tile of keys, or of values
COLUMNS = 32  # of o per program that merges
MOST_SPLITS = 128
ROWS = 16  # query heads of a program, and the fewest keys: fewer, a product of matrices does not take
_LOG2E = tl.constexpr(1.4426950408889634)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _product(a, b):
    """a · b in fp32; fp32 numbers are not rounded to TF32."""
    if _INTERPRETED:  # it multiplies the bits of bf16 as integers
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit(do_not_specialize=["window", "slots"])
def parts_kernel(
    q,  # [B, H, 1, D]; of all, the last dimension is contiguous
    keys,  # [B, K, T, D]
    values,  # [B, K, T, E]
    position,  # int64 scalar
    first_valid,  # int64 [B], read where PADDED
    o_parts,  # fp32 [B, H, splits, E], contiguous: Σ exp2(score − top) · v
    tops,  # fp32 [B, H, splits], contiguous: the greatest score, in base 2
    sums,  # fp32 [B, H, splits], contiguous: Σ exp2(score − top), and 0 for a part without keys
    q_batch,  # strides
    q_head,
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    v_token,
    kv_heads,
    window,  # T where there is none
    slots,  # T
    scale,
    softcap,
    D: tl.constexpr,
    E: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a key/value head
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH_D: tl.constexpr,
    WIDTH_E: tl.constexpr,
    PADDED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    tiles: tl.constexpr = (GROUP + ROWS - 1) // ROWS  # a group of many heads is several
    pair, split, splits = tl.program_id(0) // tiles, tl.program_id(1), tl.num_programs(1)
    # 64 bits: a cache has more elements than 32 bits count
    b, kv = (pair // kv_heads).to(tl.int64), (pair % kv_heads).to(tl.int64)
    r, d, e = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH_D), tl.arange(0, WIDTH_E)

    last = tl.load(position).to(tl.int32)
    begin = tl.maximum(last - window + 1, 0)
    if PADDED:
        begin = tl.maximum(begin, tl.load(first_valid + b).to(tl.int32))
    begin = tl.minimum(begin, last)  # the token itself is seen always
    turn = begin // slots * slots  # at most `slots` positions are seen: they end in this turn of a ring, or in the next
    each = tl.cdiv(tl.cdiv(last + 1 - begin, KEYS), splits) * KEYS
    start = begin + split * each
    end = tl.minimum(start + each, last + 1)

    head = kv * GROUP + r
    rows = r < GROUP
    of_q = q + b * q_batch + head[:, None] * q_head + d[None, :]
    query = tl.load(of_q, mask=rows[:, None] & (d < D)[None, :], other=0.0)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    o = tl.zeros((ROWS, WIDTH_E), tl.float32)
    for at in range(start, end, KEYS):
        t = at + tl.arange(0, KEYS)
        real = t < end
        wide = tl.where(t - turn < slots, t - turn, t - turn - slots).to(tl.int64)
        of_k = keys + b * k_batch + kv * k_head + wide[:, None] * k_token + d[None, :]
        key = tl.load(of_k, mask=real[:, None] & (d < D)[None, :], other=0.0)
        score = _product(query, tl.trans(key)) * scale
        if CAPPED:
            score = softcap * (2 * tl.sigmoid(2 * score / softcap) - 1)  # tanh
        score = tl.where(real[None, :], score * _LOG2E, float("-inf"))
        above = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - above[:, None])
        before = tl.exp2(top - above)
        of_v = values + b * v_batch + kv * v_head + wide[:, None] * v_token + e[None, :]
        # what is not seen is not read: 0 · NaN is NaN
        value = tl.load(of_v, mask=real[:, None] & (e < E)[None, :], other=0.0)
        o = o * before[:, None] + _product(weight.to(value.dtype), value)
        total = total * before + tl.sum(weight, 1)
        top = above

    row = ((b * kv_heads + kv) * GROUP + r) * splits + split
    tl.store(tops + row, top, mask=rows)
    tl.store(sums + row, total, mask=rows)
    if start < end:
        tl.store(o_parts + row[:, None] * E + e[None, :], o, mask=rows[:, None] & (e < E)[None, :])


@triton.jit
def merge_kernel(
    o_parts,  # as parts_kernel leaves them
    tops,
    sums,
    sinks,  # [H], contiguous, read where SINKS
    out,  # [B, H, 1, E], contiguous
    heads,
    splits,
    E: tl.constexpr,
    SPLITS: tl.constexpr,  # a power of 2
    COLUMNS: tl.constexpr,
    SINKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    p, e = tl.arange(0, SPLITS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sum_P = tl.load(sums + row * splits + p, mask=p < splits, other=0.0)
    top_P = tl.load(tops + row * splits + p, mask=p < splits, other=float("-inf"))
    top = tl.max(top_P, 0)
    if SINKS:
        sink = tl.load(sinks + row % heads).to(tl.float32) * _LOG2E
        top = tl.maximum(top, sink)
    weight_P = tl.exp2(top_P - top)
    total = tl.sum(weight_P * sum_P, 0)
    if SINKS:
        total += tl.exp2(sink - top)
    written = (sum_P != 0)[:, None] & (e < E)[None, :]  # a part without keys has no o; one of NaN has NaN
    part = tl.load(o_parts + (row * splits + p)[:, None] * E + e[None, :], mask=written, other=0.0)
    o = tl.sum(part * weight_P[:, None], 0) / total
    tl.store(out + row * E + e, o.to(out.dtype.element_ty), mask=e < E)


def splits_for(tiles: int, slots: int, keys: int, multiprocessors: int) -> int:
    """Programs that share the keys of each of `tiles` tiles of queries: one per multiprocessor in all, but no more than
    there are tiles of `keys` keys in `slots`."""
    return max(1, min(multiprocessors // tiles, triton.cdiv(slots, keys), MOST_SPLITS))


def shape(size: int, values_size: int, dtype: torch.dtype) -> tuple[dict[str, int], int]:
    """Sizes of tiles for head size `size` of keys and `values_size` of values, and how many are loaded ahead."""
    widths = [max(16, triton.next_power_of_2(each)) for each in (size, values_size)]
    keys = TILE // (max(widths) * dtype.itemsize)
    sizes = {"ROWS": ROWS, "KEYS": min(128, max(ROWS, keys)), "WIDTH_D": widths[0], "WIDTH_E": widths[1]}
    return sizes, STAGES if keys >= ROWS else STAGES - 1


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    first_valid: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    splits: int | None = None,
) -> Tensor:
    """`rewriter.kernels.decode_attention`; `splits` programs share the keys, by default as many as suit the device."""
    q, keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, keys, values))
    batch, heads, _, size = q.shape
    kv_heads, slots, values_size = keys.shape[1], keys.shape[2], values.shape[3]
    out = q.new_empty(batch, heads, 1, values_size)
    if out.numel() == 0:
        return out
    group = heads // kv_heads
    sizes, stages = shape(size, values_size, q.dtype)
    tiles = batch * kv_heads * triton.cdiv(group, ROWS)
    if splits is None:
        splits = splits_for(tiles, slots, sizes["KEYS"], _multiprocessors(q.device))
    o_parts = q.new_empty(batch, heads, splits, values_size, dtype=torch.float32)
    tops, sums = q.new_empty(2, batch, heads, splits, dtype=torch.float32)
    with current_device(q):
        parts_kernel[(tiles, splits)](
            q, keys, values, position, position if first_valid is None else first_valid.contiguous(),
            o_parts, tops, sums, *q.stride()[:2], *keys.stride()[:3], *values.stride()[:3], kv_heads,
            slots if window is None else min(window, slots), slots, float(scale),
            1.0 if softcap is None else float(softcap),
            D=size, E=values_size, GROUP=group, PADDED=first_valid is not None, CAPPED=softcap is not None, **sizes,
            num_warps=WARPS, num_stages=stages,
        )  # fmt: skip
        merge_kernel[(batch * heads, triton.cdiv(values_size, COLUMNS))](
            o_parts, tops, sums, sums if sinks is None else sinks.contiguous(), out, heads, splits,
            E=values_size, SPLITS=triton.next_power_of_2(splits), COLUMNS=COLUMNS, SINKS=sinks is not None,
            num_warps=WARPS,
        )  # fmt: skip
    return out

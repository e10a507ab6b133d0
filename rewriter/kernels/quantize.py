"""Tensors to payloads of a few bits per element and back, and the sums that quantized collectives make of payloads.

A payload is a uint8 vector that holds codes and scales (`rewriter.kernels.formats`), so that one message carries both.
On CUDA the functions launch Triton kernels; elsewhere they are plain PyTorch, which is their specification
(`rewriter.kernels.blocks`), in pieces that stay in a cache.

Rounding is to the nearest level, the same on every rank. With a `seed` it is subtractively dithered: an offset that
sender and receiver both derive from the seed is added before and taken off after rounding, so that the error is
independent of the value, has the mean 0 over seeds, and shrinks when many ranks' messages are summed. Not in fp8,
whose levels are not uniform: ValueError.

A block that holds inf or NaN comes back as NaN; finite values come back finite. Blocks whose largest magnitude is below
about 2**-119 (fp8: 2**-117) come back as zeros. Shape suffixes: R rows, N elements of a row, B bytes of a row, P
senders.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rewriter.kernels import blocks
from rewriter.kernels.devices import runs_triton
from rewriter.kernels.formats import Format, parse_format

DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # that are quantized
_LARGEST_BLOCK = 4096  # of which a program of a kernel holds one in registers
_PIECE = 1 << 17  # elements at a time on a CPU: half a MiB of fp32

_Span = tuple[slice, int, int]  # rows, the first block of them, the one after the last


def quantize(x: Tensor, format: str | Format, *, seed: int | None = None) -> Tensor:
    """The payload of x, uint8 [bytes]: any shape and length, bf16, fp16 or fp32.

    Blocks are runs of consecutive elements of the flattened x. Raises ValueError for other dtypes and unknown formats.
    """
    return quantize_rows(x.reshape(1, -1), format, seed=seed)[0]


def dequantize(
    payload: Tensor, format: str | Format, shape: Sequence[int], dtype: torch.dtype, *, seed: int | None = None
) -> Tensor:
    """The reverse of `quantize`, of a tensor of `shape`, in `dtype`; `seed` as it was given there.

    Raises ValueError if the payload does not have the size that format and shape ask for.
    """
    return dequantize_rows(payload[None], format, math.prod(shape), dtype, seed=seed).view(tuple(shape))


@torch.no_grad()
def quantize_rows(
    x_RN: Tensor,
    format: str | Format,
    *,
    order: Sequence[int] | None = None,
    seed: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """A payload per row, uint8 [R, B]; row r is that of x's row order[r]. In `out`, whose rows are contiguous.

    `order` reorders slices on the way (ZeRO++, Eq. 2). All rows are dithered alike. Raises ValueError as `quantize`.
    """
    format = parse_format(format, dithered=seed is not None)
    if x_RN.dim() != 2 or x_RN.dtype not in DTYPES:
        raise ValueError(
            f"quantize: a {x_RN.dtype} tensor of shape {list(x_RN.shape)}, expected rows of bfloat16, float16 or "
            "float32"
        )
    rows = x_RN.shape[0] if order is None else len(order)
    size = format.payload_bytes(x_RN.shape[1])
    if out is None:
        out = torch.empty(rows, size, dtype=torch.uint8, device=x_RN.device)
    if kernels := _kernels(x_RN, format):
        kernels.quantize_rows(x_RN, format, order, seed, out)
    else:
        _quantize_rows(x_RN if order is None else x_RN[list(order)], format, seed, out)
    return out


def _quantize_rows(x_RN: Tensor, format: Format, seed: int | None, out_RB: Tensor) -> None:
    rows, n = x_RN.shape
    count = format.blocks(n)
    if x_RN.numel() == 0:
        return
    planes_RKB, scales_RK, rest = _parts(out_RB, format, count)
    rest.zero_()
    for some, first, last in _pieces(rows, count, format):
        x = x_RN[some, first * format.block : last * format.block].to(torch.float32)
        missing = (last - first) * format.block - x.shape[1]
        if missing:
            x = F.pad(x, (0, missing))
        codes, scales = blocks.encode(x.reshape(x.shape[0], last - first, format.block), format, seed, first)
        scales_RK[some, first:last] = scales.to(torch.int16)
        _pack(codes, format, [plane[some, first:last] for plane in planes_RKB])


@torch.no_grad()
def dequantize_rows(
    payload_RB: Tensor,
    format: str | Format,
    n: int,
    dtype: torch.dtype,
    *,
    seed: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x_RN in `dtype` from payloads of rows of n elements; in `out` where it is given.

    With a seed, row r is the message of a sender that used seed + r. The same payload gives the same bits on every
    rank. Raises ValueError for payloads of another size.
    """
    format = parse_format(format, dithered=seed is not None)
    _check(payload_RB, format, n, 2, dtype)
    rows = payload_RB.shape[0]
    if out is None:
        out = torch.empty(rows, n, dtype=dtype, device=payload_RB.device)
    if kernels := _kernels(payload_RB, format):
        kernels.dequantize_rows(payload_RB, format, n, seed, out)
    else:
        _dequantize_rows(payload_RB, format, n, seed, out)
    return out


def _dequantize_rows(payload_RB: Tensor, format: Format, n: int, seed: int | None, out_RN: Tensor) -> None:
    finite, rows = torch.finfo(out_RN.dtype).max, out_RN.shape[0]
    # rows of one sender are dithered alike, and decoded at once where there is no dither
    for group in [slice(0, rows)] if seed is None else [slice(row, row + 1) for row in range(rows)]:
        some_seed = None if seed is None else seed + group.start
        payload, out = payload_RB[group], out_RN[group]
        for piece in _pieces(out.shape[0], format.blocks(n), format):
            some, first, last = piece
            levels, scales = _levels(payload, format, n, some_seed, piece)
            # a rotation, or the rounding of a scale, may have passed the largest number by a little; NaN stays
            x = blocks.rotate_back(levels, format).mul_(scales).clamp_(-finite, finite)
            start, end = first * format.block, min(last * format.block, n)
            out[some, start:end] = x.flatten(1)[:, : end - start]


@torch.no_grad()
def dequantize_reduce(
    payload_PRB: Tensor,
    format: str | Format,
    n: int,
    dtype: torch.dtype,
    *,
    seed: int | None = None,
    skip: int | None = None,
    add: Tensor | None = None,
    factor: float = 1.0,
) -> Tensor:
    """y_RN: the sum over senders, plus `add` [R, N], times `factor`; in fp32, in the order of senders, rounded once.

    Sender p used seed + p. Rows of the sender `skip` are not read: one's own, whose exact values come in `add`. Rotated
    blocks are summed as they are and rotated back once. Raises ValueError for payloads of another size.
    """
    format = parse_format(format, dithered=seed is not None)
    _check(payload_PRB, format, n, 3)
    out = torch.empty(payload_PRB.shape[1], n, dtype=dtype, device=payload_PRB.device)
    if kernels := _kernels(payload_PRB, format):
        kernels.dequantize_reduce(payload_PRB, format, n, seed, skip, add, factor, out)
    else:
        _dequantize_reduce(payload_PRB, format, seed, skip, add, factor, out)
    return out


def _dequantize_reduce(
    payload_PRB: Tensor,
    format: Format,
    seed: int | None,
    skip: int | None,
    add: Tensor | None,
    factor: float,
    out_RN: Tensor,
) -> None:
    senders = payload_PRB.shape[0]
    rows, n = out_RN.shape
    for piece in _pieces(rows, format.blocks(n), format):
        some, first, last = piece
        shape = len(range(rows)[some]), last - first, format.block
        total = torch.zeros(shape, dtype=torch.float32, device=payload_PRB.device)
        for p in range(senders):
            if p != skip:
                total.addcmul_(*_levels(payload_PRB[p], format, n, None if seed is None else seed + p, piece))
        start, end = first * format.block, min(last * format.block, n)
        total = blocks.rotate_back(total, format).flatten(1)[:, : end - start]
        if add is not None:
            total = total + add[some, start:end].to(torch.float32)
        out_RN[some, start:end] = total if factor == 1.0 else total * factor


@torch.no_grad()
def dequantize_reduce_quantize(
    payload_PRB: Tensor,
    format: str | Format,
    n: int,
    to: str | Format,
    *,
    seed: int | None = None,
    skip: int | None = None,
    add: Tensor | None = None,
    factor: float = 1.0,
    to_seed: int | None = None,
    order: Sequence[int] | None = None,
) -> Tensor:
    """`dequantize_reduce` and `quantize_rows` of its rows to the format `to`, with nothing but payloads in memory where
    both formats have the same block."""
    format, to = parse_format(format, dithered=seed is not None), parse_format(to, dithered=to_seed is not None)
    if format.block == to.block and (kernels := _kernels(payload_PRB, format, to)):
        _check(payload_PRB, format, n, 3)
        rows = payload_PRB.shape[1] if order is None else len(order)
        out = torch.empty(rows, to.payload_bytes(n), dtype=torch.uint8, device=payload_PRB.device)
        options = {"to": to, "to_seed": to_seed, "order": order}
        kernels.dequantize_reduce(payload_PRB, format, n, seed, skip, add, factor, out, **options)
        return out
    total = dequantize_reduce(payload_PRB, format, n, torch.float32, seed=seed, skip=skip, add=add, factor=factor)
    return quantize_rows(total, to, order=order, seed=to_seed)


def _kernels(x: Tensor, *formats: Format) -> Any:
    """The launches of Triton kernels, or None. Blocks that a program cannot hold in registers are PyTorch's on any
    device."""
    if not runs_triton(x) or any(format.block > _LARGEST_BLOCK for format in formats):
        return None
    from rewriter.kernels import quantize_triton

    return quantize_triton


def _check(payload: Tensor, format: Format, n: int, dimensions: int, dtype: torch.dtype = torch.float32) -> None:
    size = format.payload_bytes(n)
    if payload.dim() != dimensions or payload.shape[-1] != size or payload.dtype != torch.uint8:
        raise ValueError(
            f"dequantize: a payload {payload.dtype} of shape {list(payload.shape)}, expected torch.uint8 with "
            f"{dimensions} dimensions, the last of {size} bytes for {n} elements in {format}"
        )
    if dtype not in DTYPES:
        raise ValueError(f"dequantize: dtype {dtype}, expected bfloat16, float16 or float32")


def _pieces(rows: int, count: int, format: Format) -> Iterator[_Span]:
    """_Spans of about `_PIECE` elements each, of full rows where these are short."""
    blocks_at_once = max(1, _PIECE // format.block)
    rows_at_once = max(1, blocks_at_once // max(count, 1))
    for row in range(0, rows, rows_at_once):
        for first in range(0, count, blocks_at_once):
            yield slice(row, row + rows_at_once), first, min(first + blocks_at_once, count)


def _levels(payload_RB: Tensor, format: Format, n: int, seed: int | None, piece: _Span) -> tuple[Tensor, Tensor]:
    """Levels [R, K, E] and scales [R, K, 1], fp32, of a piece."""
    some, first, last = piece
    planes_RKB, scales_RK, _ = _parts(payload_RB, format, format.blocks(n))
    codes = _unpack([plane[some, first:last] for plane in planes_RKB], format)
    scales = blocks.decode_scales(scales_RK[some, first:last].to(torch.int32) & 0xFFFF)
    return blocks.decode(codes, format, seed, first), scales.unsqueeze(-1)


# --- bytes ---


def _parts(payload_RB: Tensor, format: Format, count: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Views of the planes [R, K, bytes], the scales [R, K] int16, and the bytes after them. There is a block."""
    sizes = format.part_bytes(count)
    *planes, scales, rest = payload_RB.split([*sizes, payload_RB.shape[1] - sum(sizes)], dim=1)
    return [plane.unflatten(1, (count, -1)) for plane in planes], scales.view(torch.int16), rest


def _pack(codes_RKE: Tensor, format: Format, planes: Sequence[Tensor]) -> None:
    for width, shift, plane in zip(format.planes, format.shifts, planes, strict=True):
        bits = codes_RKE if format.bits == 8 else (codes_RKE >> shift) & ((1 << width) - 1)
        total, *parts = bits.unflatten(-1, (8 // width, -1)).unbind(-2)
        for k, part in enumerate(parts, 1):
            total = total.add(part, alpha=1 << (k * width))
        plane.copy_(total)


def _unpack(planes: Sequence[Tensor], format: Format) -> Tensor:
    if format.bits == 8:
        return planes[0]
    codes, *more = (
        torch.cat([(plane >> (k * width)) & ((1 << width) - 1) for k in range(8 // width)], -1)
        for width, plane in zip(format.planes, planes, strict=True)
    )
    for bits, shift in zip(more, format.shifts[1:], strict=True):
        codes.add_(bits, alpha=1 << shift)
    return codes


# --- vectors ---

# A payload of `quantize` holds the codes of all its elements, then all scales, and is read at once. Keys and values are
# cut by heads and by tokens on their way from rank to rank, so here each vector keeps its bytes together, codes, then
# scales: any slice, stack or permutation of the other dimensions is one of bytes. A vector is filled up with zeros to
# whole blocks, so blocks that divide it cost nothing.


def vector_bytes(format: Format, n: int) -> int:
    """Bytes of a vector of `n` elements: its codes and the scales of its blocks."""
    return sum(format.part_bytes(format.blocks(n)))


def quantize_vectors(x: Tensor, format: Format) -> Tensor:
    """uint8 [..., vector_bytes(format, n)] of x [..., n] in bf16, fp16, fp32 or fp64, rounded to nearest."""
    parts = format.part_bytes(format.blocks(x.shape[-1]))
    padded = F.pad(x.float() if x.dtype == torch.float64 else x, [0, -x.shape[-1] % format.block])
    vectors = padded.shape[:-1].numel()
    places = quantize(padded, format)[: vectors * sum(parts)].split([vectors * part for part in parts])
    rows = torch.cat([place.view(vectors, part) for place, part in zip(places, parts, strict=True)], 1)
    return rows.view(*x.shape[:-1], sum(parts))


def dequantize_vectors(vectors: Tensor, format: Format, n: int, dtype: torch.dtype) -> Tensor:
    """x [..., n] of `dtype` from what `quantize_vectors` gave, in any order and of any strides."""
    shape = *vectors.shape[:-1], n + -n % format.block
    payload = vectors.new_zeros(format.payload_bytes(torch.Size(shape).numel()))
    parts = vectors.split(format.part_bytes(format.blocks(n)), -1)
    for part, end in zip(parts, accumulate(part.numel() for part in parts), strict=True):
        payload[end - part.numel() : end].view(part.shape).copy_(part)
    x = dequantize(payload, format, shape, torch.float32 if dtype == torch.float64 else dtype)
    return x[..., :n].to(dtype).contiguous()

"""Quantized vectors that can be taken apart: each keeps its own bytes together, codes then scales, nothing between.

A payload of `quantize` holds the codes of all its elements, then all scales, and is read at once. Keys and values
are cut by heads and by tokens on their way from rank to rank, so here the last dimension stays one thing: what a vector
becomes does not depend on those beside it, and any slice, stack or permutation of the other dimensions is one of bytes.
A vector is filled up with zeros to whole blocks, so blocks that divide it cost nothing.
"""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from rewriter.kernels.formats import Format
from rewriter.kernels.quantize import dequantize, quantize


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

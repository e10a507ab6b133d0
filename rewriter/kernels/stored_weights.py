"""Weights as quantization tools store them, to numbers: what plain PyTorch computes, in fp32.

Every scheme is a value per code, times a scale per group of them; how codes lie in bytes differs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod

import torch

from rewriter.kernels.devices import runs_triton

# E2M1: sign, two bits of exponent, one of mantissa (OCP Microscaling Formats 1.0, table 5)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# The place in an int32 of each of 8 neighbouring columns: AutoAWQ packs columns 0, 2, 4, 6, 1, 3, 5, 7.
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def dequantized(
    scheme: str, parts: Sequence[torch.Tensor], numbers: Sequence[int], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The tensor that `parts` stand for, by a scheme of `rewriter.weights.expressions.Dequantized`, rounded to `dtype`.

    On a GPU, FP8 and MXFP4 go through one kernel each, which reads codes and writes `dtype`.
    """
    if runs_triton(parts[0]) and scheme in ("fp8", "mxfp4"):
        from rewriter.kernels import stored_weights_triton

        if scheme == "fp8":
            return stored_weights_triton.fp8(parts[0], parts[1], numbers, dtype)
        return stored_weights_triton.mxfp4(parts[0], parts[1], dtype)
    match scheme:
        case "fp8":
            values = fp8(parts[0], parts[1], numbers)
        case "mxfp4":
            values = mxfp4(parts[0], parts[1])
        case "awq":
            values = awq(parts[0], parts[1], parts[2], *numbers)
        case "gptq":
            bits, _, added = numbers
            values = gptq(parts[0], parts[1], parts[2], parts[3], bits, added)
        case "bnb8":
            values = parts[0].to(torch.float32) * parts[1].to(torch.float32)[:, None] / 127
        case "bnb4":
            values = bitsandbytes4(parts, numbers)
        case _:
            raise ValueError(f"{scheme!r}: no such scheme of quantized weights")
    return values.to(dtype)


def scale_values(scales: torch.Tensor) -> torch.Tensor:
    """Scales in fp32; of uint8 they are exponents, E8M0: 2 ** (byte - 127)."""
    values = scales.to(torch.float32)
    return (values - 127.0).exp2() if scales.dtype == torch.uint8 else values


def fp8(codes: torch.Tensor, scales: torch.Tensor, per: Sequence[int]) -> torch.Tensor:
    """codes[…] · scale of the block that they are in. codes: [.., R, C] of an 8-bit float dtype.

    scales: fp32, bf16, fp16, E8M0 (or its bytes, uint8), [.., ceil(R / r), ceil(C / c)] for `per` = (.., r, c): as many
    dimensions as `per` has numbers, which are the last ones of the codes.
    """
    values = scale_values(scales)
    first = codes.dim() - len(per)
    for dim, count in enumerate(per):
        size = codes.shape[first + dim]
        if values.shape[dim] > 1 and count > 1:
            values = values.repeat_interleave(count, dim).narrow(dim, 0, size)
    return codes.to(torch.float32) * values


def mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """E2M1 · 2 ** (scale - 127). blocks: uint8 [.., G, 16], the even element in the low half; scales: uint8 [.., G].

    Returns [.., 32 · G]. OCP Microscaling Formats 1.0; stored so by gpt-oss.
    """
    table = torch.tensor(E2M1, dtype=torch.float32, device=blocks.device)
    halves = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    return (table[halves.int()] * scale_values(scales)[..., None]).flatten(-2)


def _unpacked(words: torch.Tensor, bits: int, places: Sequence[int], dim: int) -> torch.Tensor:
    """int32 words along `dim`, each to 32 / bits neighbours, of which the i-th is at `places[i]` in the word."""
    shifts = torch.tensor([bits * place for place in places], dtype=torch.int32, device=words.device)
    wide = words.movedim(dim, -1)[..., None] >> shifts & (1 << bits) - 1
    return wide.flatten(-2).movedim(-1, dim)


def awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """(code - zero) · scale, [inputs, outputs]. AutoAWQ's version "gemm".

    qweight: int32 [inputs, outputs · bits / 32]; qzeros: int32 [groups, outputs · bits / 32]; scales: fp16 or bf16
    [groups, outputs]; a group is `group` inputs, one after the other.
    """
    codes, zeros = (_unpacked(words, bits, AWQ_PLACES, 1) for words in (qweight, qzeros))
    inputs = codes.shape[0]
    zeros, factors = (t.repeat_interleave(group, 0)[:inputs] for t in (zeros, scales.to(torch.float32)))
    return (codes - zeros) * factors


def gptq(
    qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, g_idx: torch.Tensor, bits: int, added: int
) -> torch.Tensor:
    """(code - zero - added) · scale, [inputs, outputs]. `added` is 1 in AutoGPTQ's format, 0 in GPTQModel's "gptq_v2".

    qweight: int32 [inputs · bits / 32, outputs]; qzeros: int32 [groups, outputs · bits / 32]; scales: fp16 or bf16
    [groups, outputs]; g_idx: int32 [inputs], each input's group (in any order: act-order).
    """
    places = range(32 // bits)
    codes, zeros = _unpacked(qweight, bits, places, 0), _unpacked(qzeros, bits, places, 1)
    zeros = (zeros + added)[:, : scales.shape[1]]
    groups = g_idx.long()
    return (codes - zeros[groups]) * scales.to(torch.float32)[groups]


def bitsandbytes4(parts: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
    """quant_map[code] · absmax of the block, as bitsandbytes stores NF4 and FP4 weights.

    parts: codes, uint8 [elements / 2, 1], the even element in the high half; absmax, fp32 [blocks]; quant_map, fp32
    [16]; quant_state, JSON as uint8. Where absmax is quantized too it is uint8, and after it come nested_absmax and
    nested_quant_map: absmax = nested_quant_map[code] · nested_absmax + nested_offset.
    """
    codes, absmax, *nested, table, state = parts
    said = json.loads(bytes(state.tolist()))
    if nested:
        outer, outer_table = nested
        factors = outer.repeat_interleave(int(said["nested_blocksize"]))[: absmax.numel()]
        absmax = outer_table[absmax.int()] * factors + float(said["nested_offset"])
    flat = codes.flatten()
    values = table[torch.stack((flat >> 4, flat & 15), -1).flatten().int()][: prod(shape)]
    return (values * absmax.repeat_interleave(int(said["blocksize"]))[: values.numel()]).view(tuple(shape))

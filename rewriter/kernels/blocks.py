"""Blocks of numbers to codes and scales, and back: the specification of every format, in plain PyTorch.

Shape suffixes: R rows, K blocks of a row, E elements of a block. All arithmetic is fp32. See `formats` for the levels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from rewriter.kernels.formats import Format

_Arguments = ParamSpec("_Arguments")
_Hashed = TypeVar("_Hashed", int, Tensor)

SMALLEST = 2.0**-126  # the smallest normal fp32; a scale below it becomes 0, as its reciprocal has no use
SCALE_SHIFT = 15  # an fp32 loses its sign and 15 bits of mantissa
LARGEST_SCALE, NAN_SCALE = 0xFEFF, 0xFF80
GOLDEN = 0x4F1BBD  # 2**23 / golden ratio: its multiples are spread evenly
DITHER_STEPS, DITHER_SHIFT = 128, 16  # seven bits of a hash, below its bit 23
FIT_STEPS = 256  # numbers are rounded to this part of a level's distance where scales are fitted to them


def encode(x_RKE: Tensor, format: Format, seed: int | None, first_block: int = 0) -> tuple[Tensor, Tensor]:
    """(codes_RKE uint8, scales_RK int32 of 16 bits) of fp32 blocks; `first_block` is the index of the first in its row.

    A block that holds inf or NaN gets the scale NaN and codes of 0.
    """
    if format.rotated:
        # divided by the block's size, so that no sum overflows
        x_RKE = (x_RKE * signs(format.block, x_RKE.device)) @ (hadamard(format.block, x_RKE.device) / format.block)
    top = torch.linalg.vector_norm(x_RKE, torch.inf, -1, keepdim=True)
    broken = ~torch.isfinite(top)
    if broken.any():
        x_RKE, top = x_RKE.masked_fill(broken, 0), top.masked_fill(broken, 0)
    offsets = None if seed is None else _offsets(format, seed, first_block, x_RKE)
    if not format.odd:
        codes, scales = _symmetric(x_RKE, top, format, offsets)
    elif offsets is not None:
        codes, scales = _dithered(x_RKE, top, format, offsets)
    elif format.lloyd_max:
        codes, scales = _lloyd_max(x_RKE, top, format)
    else:
        codes, scales = _clipped(x_RKE, top, format)
    return codes.masked_fill_(broken, 0), scales.masked_fill(broken, NAN_SCALE).squeeze(-1)


def _symmetric(x: Tensor, top: Tensor, format: Format, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    largest = format.largest
    # no larger than what keeps largest · scale finite
    scales = _rounded_up(top * (1.0 / largest)).clamp_(max=finite(largest))
    v = x * _reciprocal(decode_scales(scales))
    if format.floating:  # beyond the largest level by what rounds to it at most
        return v.to(torch.float8_e4m3fn).view(torch.uint8), scales
    if offsets is not None:
        v.add_(offsets)
    return v.round_().clamp_(-largest, largest).add_(format.half).to(torch.uint8), scales


def _dithered(x: Tensor, top: Tensor, format: Format, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Odd levels, counted in half steps, that reach the largest magnitude: no sum of value and offset leaves them."""
    half = format.half
    scales = _rounded_up(top * (0.5 / (half - 0.5)))
    v = x * _reciprocal(decode_scales(scales) * 2)
    return v.add_(offsets).floor_().clamp_(-half, half - 1).add_(half).to(torch.uint8), scales


def _clipped(x: Tensor, top: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    half = format.half
    step = top * (format.clip / half)
    # so few bits that sums are the same in any order, up to blocks of 4096
    v = (x * _reciprocal(step)).mul_(FIT_STEPS).round_().mul_(1 / FIT_STEPS)
    codes = v.floor().clamp_(-half, half - 1).add_(half)
    levels = (codes * 2).add_(1 - 2 * half)
    return codes.to(torch.uint8), _fitted(v, levels, step)


def _lloyd_max(x: Tensor, top: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    v = x * _reciprocal(top)  # so that squares neither under- nor overflow
    deviation = v.square().mean(-1, keepdim=True).sqrt_()
    v *= _reciprocal(deviation)
    magnitude = v.abs()
    index = torch.zeros_like(v, dtype=torch.uint8)
    for threshold in format.thresholds:
        index += magnitude > threshold
    codes = torch.where(v < 0, format.half - 1 - index, format.half + index)
    return codes, _fitted(v, _table(format, x.device)[codes.int()], deviation * top)


def _fitted(v: Tensor, levels: Tensor, unit: Tensor) -> Tensor:
    """The scale that leaves the least squared error between v and the chosen levels, in units of x."""
    fit = (v * levels).sum(-1, keepdim=True) / levels.square().sum(-1, keepdim=True)
    return _rounded(fit * unit)


def decode(codes_RKE: Tensor, format: Format, seed: int | None, first_block: int = 0) -> Tensor:
    """Levels [R, K, E], fp32: what a scale multiplies, before the rotation back.

    Sums of them under the rotation are exact in fp32, in any order, so that all devices agree on every bit.
    """
    if seed is None and format.lloyd_max:
        return _table(format, codes_RKE.device)[codes_RKE.int()]
    if format.floating:  # the bits of an fp16, whose exponent counts from 15 instead of 7; torch converts them slowly
        bits = (codes_RKE.view(torch.int8).to(torch.int16) << 7) & ~(1 << 14)
        return bits.view(torch.float16).to(torch.float32).mul_(256)
    levels = codes_RKE.to(torch.float32)
    levels = levels.mul_(2).add_(1 - 2 * format.half) if format.odd else levels.sub_(format.half)
    if seed is not None:
        levels.sub_(_offsets(format, seed, first_block, codes_RKE), alpha=2 if format.odd else 1)
    return levels


def rotate_back(x_RKE: Tensor, format: Format) -> Tensor:
    """Levels, or sums of them times scales, as they were before the rotation: S H x, or x where nothing is rotated."""
    if not format.rotated:
        return x_RKE
    return (x_RKE @ hadamard(format.block, x_RKE.device)).mul_(signs(format.block, x_RKE.device))


def _kept(make: Callable[_Arguments, Tensor]) -> Callable[_Arguments, Tensor]:
    """`make`, whose tensors serve all later calls: not those of a FakeTensorMode, nor of inference mode alone."""
    kept: dict[tuple[object, ...], Tensor] = {}

    def get(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Tensor:
        key = (*args, *kwargs.values())
        if key not in kept:
            with torch.inference_mode(False):
                made = make(*args, **kwargs)
            if type(made) is not Tensor:
                return made
            kept[key] = made
        return kept[key]

    return get


@_kept
def hadamard(size: int, device: torch.device) -> Tensor:
    """Sylvester's matrix of ±1 [size, size], fp32: symmetric, and its square is size times the identity."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return matrix.to(device)


@_kept
def signs(size: int, device: torch.device) -> Tensor:
    """±1 [size], fp32, by which a block is multiplied before H and after: S.

    H alone turns a block of equal numbers, or of a wave, into one number next to zeros, for which there is no level.
    """
    return (1.0 - 2.0 * ((mix(torch.arange(size)) >> 7) & 1).to(torch.float32)).to(device)


@_kept
def _table(format: Format, device: torch.device) -> Tensor:
    positive = format.positive_levels
    return torch.tensor([*(-level for level in reversed(positive)), *positive], dtype=torch.float32, device=device)


# --- scales of 16 bits ---


def _bits(x: Tensor) -> Tensor:
    """The bits of fp32 values that are not negative; below the smallest normal one they become 0."""
    return torch.where(x < SMALLEST, 0.0, x).view(torch.int32)


def _rounded_up(x: Tensor) -> Tensor:
    return ((_bits(x) + ((1 << SCALE_SHIFT) - 1)) >> SCALE_SHIFT).clamp_(max=LARGEST_SCALE)


def _rounded(x: Tensor) -> Tensor:
    """To the nearest, ties to even."""
    bits = _bits(x)
    half = (1 << (SCALE_SHIFT - 1)) - 1
    return ((bits + half + ((bits >> SCALE_SHIFT) & 1)) >> SCALE_SHIFT).clamp_(max=LARGEST_SCALE)


@cache
def finite(largest: int) -> int:
    """The largest scale whose product with the largest level is finite."""
    bound = torch.tensor(torch.finfo(torch.float32).max / largest)
    return int(bound.view(torch.int32).item()) >> SCALE_SHIFT


def decode_scales(scales: Tensor) -> Tensor:
    """fp32 from the 16 bits of each (int32)."""
    return (scales << SCALE_SHIFT).view(torch.float32)


def _reciprocal(x: Tensor) -> Tensor:
    return torch.where(x < SMALLEST, 0.0, 1.0 / x)


# --- dither ---


def mix(x: _Hashed) -> _Hashed:
    """A hash of 32 bits (ints, or int64 that hold them) without collisions: each bit of x changes half of those of the
    result (lowbias32)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def _offsets(format: Format, seed: int, first_block: int, like_RKE: Tensor) -> Tensor:
    """[K, E] fp32 in (−½, ½), multiples of 1/256: a random start for each block, then multiples of the golden ratio.

    Every element's offset is uniform over seeds and those of two seeds are independent; so few steps that levels less
    their offsets still have few enough bits for exact sums.
    """
    blocks = torch.arange(first_block, first_block + like_RKE.shape[-2], device=like_RKE.device)
    start = mix((blocks + mix(torch.tensor(seed & 0xFFFFFFFF, device=like_RKE.device))) & 0xFFFFFFFF)
    steps = torch.arange(format.block, device=like_RKE.device) * GOLDEN
    hashed = ((start[:, None] + steps[None, :]) >> DITHER_SHIFT) & (DITHER_STEPS - 1)
    return (hashed.to(torch.float32) - (DITHER_STEPS / 2 - 0.5)) / DITHER_STEPS

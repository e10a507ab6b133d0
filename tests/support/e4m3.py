"""E4M3 by its definition (OCP 8-bit floating point): its numbers, and the nearest one to a number."""

from __future__ import annotations

import torch
from torch import Tensor


def numbers() -> Tensor:
    """Those of the codes 0 … 126, fp64, ascending: m · 2⁻⁹ below 2⁻⁶, then (1 + m / 8) · 2^(e − 7). 127 is NaN."""
    codes = torch.arange(127)
    exponent, mantissa = codes >> 3, (codes & 7).double()
    return torch.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def middles() -> Tensor:
    return (numbers()[1:] + numbers()[:-1]) / 2


def nearest(x: Tensor) -> Tensor:
    """Codes, uint8, of magnitudes up to 448: ties to the even code."""
    magnitude, between = x.double().abs(), middles()
    below = torch.searchsorted(between, magnitude)
    tie = magnitude == between[below.clamp(max=125)]
    code = below + (tie & (below % 2 == 1))
    return (code + 128 * x.signbit()).to(torch.uint8)


def around_ties() -> Tensor:
    """fp32 [blocks, 128]: E4M3's numbers, the middles between them and the fp32 numbers beside these, of both signs.
    448 begins each block, so that its scale is 1."""
    ties = middles().float()
    beside = [ties.nextafter(torch.tensor(limit)) for limit in (0.0, 448.0)]
    x = torch.cat([numbers().float(), ties, *beside])
    x = torch.cat([x, -x])
    x = torch.cat([x, x.new_zeros(-x.numel() % 127)]).view(-1, 127)
    return torch.cat([torch.full((len(x), 1), 448.0), x], 1)

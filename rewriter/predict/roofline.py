"""Seconds of a kernel on a device: the longer of its arithmetic and its memory traffic, and the gap before it.

A product is cut into tiles of 128 × 128 results, and along its depth where these would leave SMs idle; tiles run in
waves, one per SM. With fewer SMs, because a collective holds some, a product that just fits needs a second wave: one of
132 tiles on 132 SMs takes twice as long beside an all-gather of 24 blocks, as was measured on an H100 (NVIDIA developer
forum 337991). Memory that a collective reads and writes meanwhile is missing too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rewriter.predict.device import Rates
from rewriter.predict.kernel_cost import Kernel

_TILE, _SMALLEST_TILE, _SPLIT_DEPTH = 128, 16, 512


@dataclass(frozen=True)
class Contention:
    """What something else takes from the device meanwhile: `blocks` SMs, `bandwidth` bytes per second of memory, and of
    a CPU the time of `cores` cores."""

    blocks: int = 0
    bandwidth: float = 0.0
    cores: float = 0.0


ALONE = Contention()


def seconds(kernel: Kernel, rates: Rates, beside: Contention = ALONE) -> float:
    """Time of one kernel on the device, with the gap that separates it from the kernel before it.

    However much something else takes, half of the SMs and of the bandwidth are left: the two share the device.
    """
    sms = max(rates.sms - beside.blocks, rates.sms // 2, 1)
    bandwidth = max(rates.bandwidth - beside.bandwidth, rates.bandwidth / 2)
    working = max(_arithmetic(kernel, rates, sms), kernel.nbytes / bandwidth)
    return working * rates.sms / max(rates.sms - beside.cores, rates.sms / 2) + rates.gap


def total(kernels: Sequence[Kernel], rates: Rates, beside: Contention = ALONE) -> float:
    """Time of kernels one after the other."""
    return sum(seconds(kernel, rates, beside) for kernel in kernels)


def _arithmetic(kernel: Kernel, rates: Rates, sms: int) -> float:
    if kernel.work == "glue":
        return 0.0
    if kernel.work == "attention":
        return kernel.flops / rates.attention_flops * rates.sms / sms
    tile = _TILE if kernel.rows >= _TILE else max(_SMALLEST_TILE, 1 << (kernel.rows - 1).bit_length())
    tiles = kernel.batches * math.ceil(kernel.rows / tile) * math.ceil(kernel.columns / _TILE)
    splits = 1
    if tiles < sms:
        splits = min(max(1, kernel.depth // _SPLIT_DEPTH), max(1, sms // tiles))
    of_one = 2.0 * tile * _TILE * kernel.depth / splits / (rates.product_flops / rates.sms)
    return math.ceil(tiles * splits / sms) * of_one

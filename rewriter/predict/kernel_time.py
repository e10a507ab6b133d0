"""Seconds of a kernel on a device: as measured, or on a roofline where it was not: the longer of its arithmetic and its
memory traffic, and the gap before it. A measured kernel becomes slower next to a collective as it does on the roofline.

A product is cut into tiles of 128 × 128 results, and along its depth where these would leave SMs idle; tiles run in
waves, one per SM. With fewer SMs, because a collective holds some, a product that just fits needs a second wave: one of
132 tiles on 132 SMs takes twice as long next to an all-gather of 24 blocks, as was measured on an H100 (NVIDIA
developer forum 337991). Memory that a collective reads and writes meanwhile is missing too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rewriter.common.errors import RewriterError
from rewriter.fabric import Device
from rewriter.fabric.kernel_tables import KernelTable, Promised, kernel_table
from rewriter.fabric.overlap import NONE, OverlapCosts
from rewriter.predict.kernel_cost import Kernel

_TILE, _SPLIT_DEPTH = 128, 512


@dataclass(frozen=True)
class Rates:
    """Rates that a device sustains, not those that its vendor promises.

    `product_flops`, `attention_flops`: FLOP per second of large matrix products and of fused attention.
    `bandwidth`: bytes per second of device memory, as a copy or a long product reaches it. `sms`: streaming
    multiprocessors. `gap`: seconds between the ends of two kernels besides their work. `launch`: seconds of the host
    per kernel that it launches; 0 where a graph is replayed. `table`: kernels measured on such a device, whose kernels
    of `dtype` stand for this one's, which promises `promised`; None: there are none. `factor`: all kernels take this
    many times as long. `overlap`: what overlap costs. `tile`: rows of the smallest tile of a product.
    """

    product_flops: float
    attention_flops: float
    bandwidth: float
    sms: int
    gap: float
    launch: float
    table: KernelTable | None = None
    dtype: str = ""
    promised: Promised | None = None
    factor: float = 1.0
    overlap: OverlapCosts = NONE
    tile: int = 16


def rates_of(device: Device, dtype: str, graphed: bool, overlap: OverlapCosts = NONE) -> Rates:
    """The rates of `device` in a dtype. Raises RewriterError where the fabric does not say what predictions need."""
    if not device.peak or device.bandwidth <= 0.0:
        raise RewriterError(
            f"{device.name}: its fabric says nothing of its arithmetic and memory, so nothing can be predicted on it. "
            "Add peak and bandwidth to the device, or name another fabric"
        )
    if dtype not in device.peak:
        raise RewriterError(
            f"{device.name}: no peak FLOP/s for {dtype}, the model's dtype. Known: {', '.join(sorted(device.peak))}. "
            "Give the model's config one of them as dtype, or add it to the fabric's device"
        )
    products = device.peak[dtype] * device.efficiency
    return Rates(
        product_flops=products,
        attention_flops=min(device.flops, products) if dtype == "float32" else device.flops,
        bandwidth=device.bandwidth * device.memory_efficiency,
        sms=device.multiprocessors,
        gap=device.launch_graphed,
        launch=0.0 if graphed else device.launch,
        table=kernel_table(device.kernels) if device.kernels else None,
        dtype=dtype,
        promised=Promised(device.peak, device.bandwidth),
        overlap=overlap,
        tile=device.tile,
    )


@dataclass(frozen=True)
class Contention:
    """Share of the device that something else takes meanwhile: `blocks` SMs, `bandwidth` bytes per second of memory,
    of a CPU the time of `cores` cores."""

    blocks: int = 0
    bandwidth: float = 0.0
    cores: float = 0.0


ALONE = Contention()


def seconds(kernel: Kernel, rates: Rates, beside: Contention = ALONE) -> float:
    """Time of one kernel on the device, with the gap that separates it from the kernel before it."""
    known = measured(kernel, rates)
    if known is None:
        if kernel.parts:
            return sum(seconds(part, rates, beside) for part in kernel.parts)
        return roofline_seconds(kernel, rates, beside) * rates.factor
    if beside == ALONE:
        return known
    return known * _roofline(kernel, rates, beside) / _roofline(kernel, rates, ALONE)


def measured(kernel: Kernel, rates: Rates) -> float | None:
    """Its time alone by the device's table of measured kernels, at the clocks of a device that is busy, or None.

    Measurements are of moments; arithmetic that goes on draws as much power as a device may.
    """
    known, on = _of_table(kernel, rates), rates.promised
    if known is None:
        return None
    bound = on is not None and kernel.flops / on.flops[computed_in(kernel, rates)[0]] > kernel.nbytes / on.bandwidth
    return known * rates.factor * (1.0 + (rates.overlap.clocks if bound else 0.0))


def _of_table(kernel: Kernel, rates: Rates) -> float | None:
    table, dtype, on = rates.table, rates.dtype, rates.promised
    if table is None:
        return None
    if kernel.work == "glue":
        return table.glue(kernel.nbytes, kernel.rows, kernel.columns if kernel.columns > 1 else 0, on)
    stored, bits = computed_in(kernel, rates)
    if kernel.work == "product":
        alone = kernel.batches == 1
        return table.product(kernel.rows, kernel.columns, kernel.depth, stored, on, bits) if alone else None
    if not kernel.groups:
        return None
    if kernel.work == "experts":
        sizes = kernel.rows, kernel.depth, kernel.columns, kernel.groups, kernel.batches
        return table.experts(*sizes, stored, on, bits)
    pairs = kernel.flops / (4.0 * kernel.batches * kernel.depth)
    return table.attention(
        kernel.rows, kernel.columns, kernel.depth, max(1, kernel.batches // kernel.groups), kernel.groups, dtype, on,
        pairs,
    )  # fmt: skip


def computed_in(kernel: Kernel, rates: Rates) -> tuple[str, float | None]:
    """(dtype that a product or experts are computed in, bits of their weights where these are of another format)."""
    stored, on = kernel.stored, rates.promised
    if stored is None:
        return rates.dtype, None
    if stored.computes and on is not None and stored.computes in on.flops:
        return stored.computes, None
    return rates.dtype, stored.bits


def measured_seconds(kernel: Kernel, rates: Rates) -> float:
    """The part of its time alone that is measured."""
    known = measured(kernel, rates)
    return sum(measured_seconds(part, rates) for part in kernel.parts) if known is None else known


def _roofline(kernel: Kernel, rates: Rates, beside: Contention) -> float:
    parts = kernel.parts or (kernel,)
    return sum(roofline_seconds(part, rates, beside) for part in parts)


def roofline_seconds(kernel: Kernel, rates: Rates, beside: Contention = ALONE) -> float:
    """Time of one kernel on the device, with the gap that separates it from the kernel before it.

    However much something else takes, half of the SMs and of the bandwidth are left: the two share the device.
    """
    sms = max(rates.sms - beside.blocks, rates.sms // 2, 1)
    bandwidth = max(rates.bandwidth - beside.bandwidth, rates.bandwidth / 2)
    working = max(_arithmetic(kernel, rates, sms), kernel.nbytes / bandwidth)
    return working * rates.sms / max(rates.sms - beside.cores, rates.sms / 2) + rates.gap


def _arithmetic(kernel: Kernel, rates: Rates, sms: int) -> float:
    if kernel.work == "glue":
        return 0.0
    if kernel.work == "attention":
        return kernel.flops / rates.attention_flops * rates.sms / sms
    tile = _TILE if kernel.rows >= _TILE else max(rates.tile, 1 << (kernel.rows - 1).bit_length())
    tiles = kernel.batches * math.ceil(kernel.rows / tile) * math.ceil(kernel.columns / _TILE)
    splits = 1
    if tiles < sms:
        splits = min(max(1, kernel.depth // _SPLIT_DEPTH), max(1, sms // tiles))
    flops, computes = rates.product_flops, computed_in(kernel, rates)[0]
    if computes != rates.dtype and rates.promised is not None:
        flops *= rates.promised.flops[computes] / rates.promised.flops[rates.dtype]
    of_one = 2.0 * tile * _TILE * kernel.depth / splits / (flops / rates.sms)
    return math.ceil(tiles * splits / sms) * of_one

"""Seconds of a kernel on a device: as measured, or on a roofline where it was not.

Beside a collective a measured kernel becomes slower as it does on the roofline.
"""

from __future__ import annotations

from rewriter.predict import roofline
from rewriter.predict.kernel_cost import Kernel
from rewriter.predict.roofline import ALONE, Contention, Rates


def seconds(kernel: Kernel, rates: Rates, beside: Contention = ALONE) -> float:
    """Time of one kernel on the device, with the gap that separates it from the kernel before it."""
    known = measured(kernel, rates)
    if known is None:
        if kernel.parts:
            return sum(seconds(part, rates, beside) for part in kernel.parts)
        return roofline.seconds(kernel, rates, beside) * rates.factor
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
    bound = on is not None and kernel.flops / on.flops[rates.dtype] > kernel.nbytes / on.bandwidth
    return known * rates.factor * (1.0 + (rates.overlap.clocks if bound else 0.0))


def _of_table(kernel: Kernel, rates: Rates) -> float | None:
    table, dtype, on = rates.table, rates.dtype, rates.promised
    if table is None:
        return None
    if kernel.work == "glue":
        return table.glue(kernel.nbytes, kernel.rows, kernel.columns if kernel.columns > 1 else 0, on)
    if kernel.work == "product":
        alike = kernel.batches == 1
        return table.product(kernel.rows, kernel.columns, kernel.depth, dtype, on) if alike else None
    if not kernel.groups:
        return None
    if kernel.work == "experts":
        return table.experts(kernel.rows, kernel.depth, kernel.columns, kernel.groups, kernel.batches, dtype, on)
    pairs = kernel.flops / (4.0 * kernel.batches * kernel.depth)
    return table.attention(
        kernel.rows, kernel.columns, kernel.depth, max(1, kernel.batches // kernel.groups), kernel.groups, dtype, on,
        pairs,
    )  # fmt: skip


def measured_seconds(kernel: Kernel, rates: Rates) -> float:
    """Of its time alone, the part that is measured."""
    known = measured(kernel, rates)
    return sum(measured_seconds(part, rates) for part in kernel.parts) if known is None else known


def _roofline(kernel: Kernel, rates: Rates, beside: Contention) -> float:
    parts = kernel.parts or (kernel,)
    return sum(roofline.seconds(part, rates, beside) for part in parts)

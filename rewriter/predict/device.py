"""The rates of a device as the roofline needs them, for one model dtype."""

from __future__ import annotations

from dataclasses import dataclass

from rewriter.common.errors import RewriterError
from rewriter.fabric import Device


@dataclass(frozen=True)
class Rates:
    """What a device sustains, not what its vendor promises.

    `product_flops`, `attention_flops`: FLOP per second of large matrix products and of fused attention.
    `bandwidth`: bytes per second of device memory, as a copy or a long product reaches it. `sms`: streaming
    multiprocessors. `gap`: seconds between the ends of two kernels besides their work. `launch`: seconds of the host
    per kernel that it launches; 0 where a graph is replayed.
    """

    product_flops: float
    attention_flops: float
    bandwidth: float
    sms: int
    gap: float
    launch: float


def rates_of(device: Device, dtype: str, graphed: bool) -> Rates:
    """What `device` sustains in a dtype. Raises RewriterError where the fabric does not say what predictions need."""
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
    )

"""Fabrics with published figures. What was measured is preferred to what a vendor promises.

Attention kernels: FlashAttention-3 reaches 740 TFLOP/s on an H100 SXM in 16 bits (arXiv 2407.08608, abstract);
FlashAttention-2 reaches 73 % of the 312 TFLOP/s of an A100 (arXiv 2307.08691, abstract). `call` is a default of ours:
about the time of a small kernel with its launch.

Links inside: the slope between all-gathers of 256 and 512 MB over 8 GPUs, NCCL 2.27.3 (AIConfigurator's tables):
351 GB/s for H100 SXM, 219 GB/s for A100 SXM. Between: one adapter of 400 or 200 Gb/s per GPU, as in DGX H100 and DGX
A100, of which 48 GB/s arrive (nccl-tests #290), for the older one half of it. Latencies are those of NCCL's own tuning
model, ring and simple protocol (src/graph/tuning.cc): 3.4 µs over NVLink, 14 µs over a network.
"""

from __future__ import annotations

from rewriter.fabric.links import Device, Fabric, Link

_NVLINK, _NETWORK = 3.4e-6, 14e-6

FABRICS = {
    fabric.name: fabric
    for fabric in (
        Fabric("h100", Device("H100 SXM", 740e12, 80 * 10**9, 10e-6), 8, Link(_NVLINK, 351e9), Link(_NETWORK, 48e9)),
        Fabric("a100", Device("A100 SXM", 228e12, 80 * 10**9, 10e-6), 8, Link(_NVLINK, 219e9), Link(_NETWORK, 24e9)),
    )
}

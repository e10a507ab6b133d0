"""The device of a rank, measured: arithmetic, memory, launches."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from rewriter.fabric.writing import short

_BYTES = 128 << 20
_MATRIX = {"cpu": 1024, "cuda": 8192}
# (batch, heads, tokens, head size) and dtype: what models on such devices have
_ATTENTION = {"cpu": ((1, 8, 1024, 64), "float32"), "cuda": ((4, 32, 4096, 128), "bfloat16")}


def device_section(device: torch.device, source: str) -> dict[str, Any]:
    """The `device` of a fabric's file. Rates are those reached, so that their efficiencies are 1.

    flops: products of square matrices. memory_bandwidth: a copy, its reads and writes. launch_seconds: the host's time
    for an addition of one element.
    """

    def figure(value: float, how: str) -> dict[str, Any]:
        return {"value": value if isinstance(value, int) else short(value), "source": f"{how}; {source}"}

    name = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    processors, memory, where = torch.get_num_threads(), 0, "of the host"
    if cuda := device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, processors, where = properties.name, int(properties.multi_processor_count), "of the device"
        memory = int(properties.total_memory)
    size, (shape, dtype) = _MATRIX[device.type], _ATTENTION[device.type]
    launch, reached, added = _launch(device), "rates are those reached", "an addition of one element"
    return {
        "name": name,
        "flops": {
            known: figure(_product(device, size, getattr(torch, known)), f"products of {size} × {size} matrices")
            for known in ("float32", "bfloat16")
        },
        "efficiency": figure(1.0, reached),
        "attention_flops": figure(_attention(device, shape, dtype), f"attention of {shape} {dtype}, forward"),
        "memory_bytes": figure(memory or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), where),
        "memory_bandwidth": figure(_copy(device), f"a copy of {_BYTES >> 20} MiB, reads and writes"),
        "memory_efficiency": figure(1.0, reached),
        "call_seconds": figure(launch, added),
        "launch_seconds": figure(launch, added),
        "graphed_launch_seconds": figure(0.0 if cuda else launch, "assumed: 0 on CUDA, no graphs else"),
        "multiprocessors": figure(processors, "as the system reports"),
    }


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """The median of seven, after two runs."""
    times = []
    for _ in range(2 + 7):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begun = time.monotonic()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.monotonic() - begun)
    return statistics.median(times[2:])


def _product(device: torch.device, size: int, dtype: torch.dtype) -> float:
    a = torch.ones(size, size, device=device, dtype=dtype)
    return 2 * size**3 / _seconds(lambda: a @ a, device)


def _attention(device: torch.device, shape: tuple[int, int, int, int], dtype: str) -> float:
    q = torch.ones(shape, device=device, dtype=getattr(torch, dtype))
    batch, heads, tokens, size = shape
    return 4 * batch * heads * tokens**2 * size / _seconds(lambda: F.scaled_dot_product_attention(q, q, q), device)


def _copy(device: torch.device) -> float:
    source = torch.ones(_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return 2 * _BYTES / _seconds(lambda: target.copy_(source), device)


def _launch(device: torch.device) -> float:
    one, count = torch.ones(1, device=device), 500
    one.add_(1)  # the first one loads the kernel
    begun = time.monotonic()
    for _ in range(count):
        one.add_(1)
    return (time.monotonic() - begun) / count

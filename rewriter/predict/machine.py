"""What a rank computes with, measured: arithmetic, memory, launches."""

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

_MATRIX, _BYTES = 1024, 128 << 20
_LARGER = 8  # times, on CUDA
_ATTENTION = (1, 8, 1024, 64)  # batch, heads, tokens, head size
_ATTENTION_CUDA = (4, 32, 4096, 128)


def device_section(device: torch.device, source: str) -> dict[str, Any]:
    """The `device` of a fabric's file. Rates are those reached, so that their efficiencies are 1.

    flops: products of square matrices. memory_bandwidth: a copy, its reads and writes. launch_seconds: the host's time
    for an addition of one element.
    """

    def figure(value: float, how: str) -> dict[str, Any]:
        return {"value": value if isinstance(value, int) else short(value), "source": f"{how}; {source}"}

    launch, reached = _launch(device), "rates are those reached"
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return {
        "name": _name(device),
        "flops": {
            name: figure(_product(device, dtype), f"products of {_matrix(device)} × {_matrix(device)} matrices")
            for name, dtype in dtypes.items()
        },
        "efficiency": figure(1.0, reached),
        "attention_flops": figure(_attention(device), "attention of {} {}, forward".format(*_attended(device))),
        "memory_bytes": figure(_memory(device), "of the device" if device.type == "cuda" else "of the host"),
        "memory_bandwidth": figure(_copy(device), f"a copy of {_BYTES >> 20} MiB, reads and writes"),
        "memory_efficiency": figure(1.0, reached),
        "call_seconds": figure(launch, "an addition of one element"),
        "launch_seconds": figure(launch, "an addition of one element"),
        "graphed_launch_seconds": figure(
            0.0 if device.type == "cuda" else launch, "assumed: 0 on CUDA, no graphs else"
        ),
        "multiprocessors": figure(_processors(device), "as the system reports"),
    }


def _seconds(run: Callable[[], object], device: torch.device, repetitions: int = 7) -> float:
    """The median, after two runs."""
    times = []
    for _ in range(repetitions + 2):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begun = time.monotonic()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.monotonic() - begun)
    return statistics.median(times[2:])


def _matrix(device: torch.device) -> int:
    return _MATRIX * (_LARGER if device.type == "cuda" else 1)


def _product(device: torch.device, dtype: torch.dtype) -> float:
    size = _matrix(device)
    a = torch.ones(size, size, device=device, dtype=dtype)
    return 2 * size**3 / _seconds(lambda: a @ a, device)


def _attended(device: torch.device) -> tuple[tuple[int, int, int, int], str]:
    """Shape and dtype: what models on such devices have."""
    return (_ATTENTION_CUDA, "bfloat16") if device.type == "cuda" else (_ATTENTION, "float32")


def _attention(device: torch.device) -> float:
    shape, dtype = _attended(device)
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


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _processors(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return torch.get_num_threads()


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"

"""Shapes and random cases for plans of sequence-sharded attention."""

from __future__ import annotations

import random

from rewriter.fabric import Device, Fabric, Link
from rewriter.passes.sequence.distributed_attention import AttentionShape

WIDE = 10**9  # head size: log-sum-exps vanish beside it


def drawn(seed: int) -> tuple[AttentionShape, int, int]:
    """A random shape, number of ranks and length."""
    draw = random.Random(seed)
    kv_heads = draw.choice([1, 2, 3, 4, 8, 12])
    shape = AttentionShape(
        kv_heads * draw.choice([1, 2, 3, 4, 7, 16]),
        kv_heads,
        head := draw.choice([8, 64, 128]),
        draw.choice([head, head // 2]),
        layers=draw.choice([1, 3]),
        batch=draw.choice([1, 2]),
        dtype_bytes=draw.choice([2, 4, 8]),
        causal=draw.choice([True, False]),
    )
    return shape, draw.randint(1, 36), draw.choice([500, 4096, 65536])


DEVICE = Device("test", flops=1e12, memory=10**9, call=0.0)


def uniform(bandwidth: float, latency: float = 0.0, device: Device = DEVICE) -> Fabric:
    return Fabric("uniform", device, 1, Link(latency, bandwidth), Link(latency, bandwidth))

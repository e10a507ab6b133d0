"""Inputs, masks and a naive fp64 loop that attention of the runtime is compared with."""

from __future__ import annotations

import math

import torch

from rewriter.runtime import MaskSpec

BATCH, HEADS, LENGTH, HEAD = 3, 4, 11, 8


MASKS = [MaskSpec("causal"), MaskSpec("window", 4), MaskSpec("chunk", 4), MaskSpec("bidirectional")]


EXTRAS = {
    "plain": {},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "both": {"softcap": 3.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


PADDING = torch.tensor([0, 3, 7])


def inputs(kv_heads, head_v=HEAD, seed=0, length=LENGTH):
    random = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(BATCH, heads, length, head, generator=random)
        for heads, head in ((HEADS, HEAD), (kv_heads, HEAD), (kv_heads, head_v))
    )


def sees(mask, s, t):
    if mask.kind == "window":
        return s - mask.size < t <= s
    if mask.kind == "chunk":
        return t <= s and s // mask.size == t // mask.size
    return mask.kind == "bidirectional" or t <= s


def naive(q, k, v, mask, scale, padding=None, softcap=None, sinks=None, bias=None):
    """One query, one head, one key at a time, in Python floats. Rows of padding are left at zero."""
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    q, k, v = q.double(), k.double(), v.double()
    for b in range(q.shape[0]):
        first = 0 if padding is None else int(padding[b])
        for h in range(q.shape[1]):
            kv = h // (q.shape[1] // k.shape[1])
            for s in range(first, q.shape[2]):
                keys = [t for t in range(first, k.shape[2]) if sees(mask, s - first, t - first)]
                scores = [float(q[b, h, s] @ k[b, kv, t]) * scale for t in keys]
                if softcap is not None:
                    scores = [math.tanh(score / softcap) * softcap for score in scores]
                if bias is not None:
                    scores = [score + float(bias[0, h, s, t]) for score, t in zip(scores, keys, strict=True)]
                weights = [math.exp(score) for score in scores]
                total = sum(weights) + (0 if sinks is None else math.exp(float(sinks[h])))
                for t, weight in zip(keys, weights, strict=True):
                    out[b, h, s] += weight / total * v[b, kv, t]
    return out


def real_rows(o, padding):
    return torch.cat([o[b, :, int(first) :].flatten() for b, first in enumerate(padding)])


def check(got, expected, padding):
    assert torch.isfinite(got).all()
    rows = torch.zeros(BATCH, dtype=torch.int64) if padding is None else padding
    torch.testing.assert_close(real_rows(got, rows).double(), real_rows(expected, rows), rtol=1e-5, atol=1e-5)

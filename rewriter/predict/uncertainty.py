"""Uncertainty of a prediction: intervals that hold the truth in 80 of 100 cases, if the terms are as uncertain as
is said here.

Each term is changed by one standard deviation, one at a time, and what is predicted is simulated again; the logarithms
of the changes add up as squares. Nothing here was fitted to measurements of whole models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist

from rewriter.fabric import Delay
from rewriter.predict.kernel_cost import Kernel, Work
from rewriter.predict.kernel_time import Rates, measured_seconds, seconds

COVERED = 0.8
_DEVIATIONS = NormalDist().inv_cdf((1 + COVERED) / 2)

# By how much another library's kernel of the same sizes differs, 16 to 84 % of them (`benchmarks.predict.kernel_tables
# --libraries`): -9 to +8 % of products, -17 to +22 % of attention. Held-out errors of the tables are smaller. Experts,
# and glue, which a compiler cuts as it likes: assumed.
_KERNELS: Mapping[Work, float] = {"product": 0.06, "attention": 0.15, "experts": 0.12, "glue": 0.2}
_ROOFLINE = 0.25  # roofline against measured kernels of the six systems, products of at most 128 rows
# The same kernels on another device than the measured one, in proportion to what both promise: the systems' tables
# differ so in products.
_BORROWED = 0.15
# Held-out errors of measured collectives: 90 % of those below 4 MiB within 17 %, 68 % of larger ones within 3.6 %; NCCL
# 2.23 and 2.29 differ as much in these.
_LATENCY, _TRANSFER = 0.1, 0.04
_FORMULA = 0.3  # two nodes by formula against reports: see docs/figures/prediction.md
_TERMS = {"crossing": 2.0, "contention": 1.6, "jitter": 1.7, "clocks": 1.8, "step": 2.0}  # times as much; assumed

# Of a server's time per output token, beyond its kernels: what schedulers, samplers and batching differ in. End-to-end
# runs of TensorRT-LLM and vLLM at 112 equal workloads differ so that one engine's logarithm deviates by 0.127 from the
# typical one. 0.060 of it is the kernels' part of a decode step, whose terms stand above (benchmarks.predict.engines).
SERVER = math.sqrt(0.127**2 - 0.060**2)


def changes(rates: Rates, kernels: Iterable[Kernel], modelled: bool) -> list[tuple[Rates, bool]]:
    """Terms of a device whose time goes into `kernels`, each one standard deviation off: (another device, whether
    collectives take longer, as `longer` says)."""
    listed = [(replace(rates, factor=rates.factor * (1 + kernel_deviation(rates, kernels))), False), (rates, True)]
    for term, factor in _TERMS.items():
        if (overlap := rates.overlap.times(term, factor)) != rates.overlap:
            listed.append((replace(rates, overlap=overlap), False))
    return listed


def longer(delay: Delay, modelled: bool) -> Delay:
    """A collective that takes one standard deviation longer. `modelled`: it is by formula."""
    latency, transfer = (_FORMULA, _FORMULA) if modelled else (_LATENCY, _TRANSFER)
    more = latency * (delay.seconds - delay.transfer) + transfer * delay.transfer
    return delay.lasting(delay.seconds + more)


def kernel_deviation(rates: Rates, kernels: Iterable[Kernel]) -> float:
    """One standard deviation of the time of all kernels, as a share: those of a kind are off together."""
    by_kind: dict[str, float] = {}
    whole, borrowed = 0.0, borrowed_from(rates)
    for kernel in kernels:
        took, known = seconds(kernel, rates), measured_seconds(kernel, rates)
        by_kind[kernel.work] = by_kind.get(kernel.work, 0.0) + _KERNELS[kernel.work] * known
        if borrowed:
            by_kind["borrowed"] = by_kind.get("borrowed", 0.0) + _BORROWED * known
        by_kind["roofline"] = by_kind.get("roofline", 0.0) + _ROOFLINE * max(0.0, took - known)
        whole += took
    return math.hypot(*by_kind.values()) / whole if whole else 0.0


def borrowed_from(rates: Rates) -> str:
    """The system whose kernels were measured, where that is a device which promises something else; else ""."""
    table, on = rates.table, rates.promised
    if table is None or on is None:
        return ""
    same = on.bandwidth == table.own.bandwidth and on.flops.get("bfloat16") == table.own.flops["bfloat16"]
    return "" if same else table.name


def interval(predicted: float, changed: Sequence[float]) -> tuple[float, float]:
    """(low, high) around `predicted`, from what is predicted where each term is one standard deviation off."""
    if predicted <= 0.0:
        return predicted, predicted
    width = _DEVIATIONS * math.hypot(*(math.log(max(value, 1e-12) / predicted) for value in changed))
    return predicted * math.exp(-width), predicted * math.exp(width)

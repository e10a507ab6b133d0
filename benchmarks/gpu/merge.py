"""Section merge of `run.py`: the Triton kernel that merges partial outputs, beside PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gpu.report import Row, Scale, Table, compiled, copy_rate
from rewriter.kernels.merge import Parts, merge_reference

Merge = Callable[[Parts], tuple[Tensor, Tensor]]


def merging(scale: Scale) -> Table:
    rate = copy_rate(scale)
    table = scale.table(
        f"Merging bf16 parts into bf16: the Triton kernel beside PyTorch; a copy moves {rate / 1e9:.0f} GB/s",
        ("parts", "× rounding", "µs", "GB/s", "of a copy", "eager µs", "torch.compile µs", "result"),
    )
    shape = scale.pick((1, 32, 16384, 128), (1, 2, 9, 16))
    eager = functools.partial(rounded, merge_reference)
    fast = compiled(scale, eager)
    for count in (2, 4, 8):
        table.attempt(str(count), functools.partial(merge_row, scale, shape, count, rate, eager, fast))
    return table


def rounded(merged: Merge, parts: Parts) -> tuple[Tensor, Tensor]:
    """(o in the dtype of the parts, lse): what is used next."""
    o, lse = merged(parts)
    return o.to(parts[0][0].dtype), lse


def merge_row(scale: Scale, shape: tuple[int, ...], count: int, rate: float, eager: Merge, fast: Merge) -> Row:
    """Errors of `count` parts, of which some rows saw nothing, and times; `rate` is a copy's."""
    from rewriter.kernels.merge_triton import launch

    parts, out, sums, step = launched(scale, shape, count)
    off, wrong = errors(parts, out, sums, step)
    seconds = scale.seconds(lambda: launch(parts, out, sums))
    moved = sum(o.nbytes + lse.nbytes for o, lse in parts) + out.nbytes + sums.nbytes
    others = [f"{scale.seconds(lambda how=how: how(parts)) * 1e6:.0f}" for how in (eager, fast)]
    times = f"{seconds * 1e6:.0f}", f"{moved / seconds / 1e9:.0f}", f"{moved / seconds / rate:.0%}"
    return (f"{off:.2f}", *times, *others), wrong


def launched(scale: Scale, shape: tuple[int, ...], count: int) -> tuple[Parts, Tensor, Tensor, float]:
    """(random parts, what the kernel makes of them: o and lse, the least relative error that rounding leaves)."""
    from rewriter.kernels.merge_triton import launch

    torch.manual_seed(count)
    parts = []
    for p in range(count):
        o = torch.randn(shape, device=scale.device).bfloat16()
        lse = torch.randn(shape[:-1], device=scale.device) * 4 + 10
        o[:, :, p :: count + 1], lse[:, :, p :: count + 1] = 0, -torch.inf
        parts.append((o, lse))
    out, sums = torch.full_like(parts[0][0], torch.nan), torch.full_like(parts[0][1], torch.nan)
    launch(parts, out, sums)
    # half a step of bf16; the interpreter cuts off instead
    return parts, out, sums, torch.finfo(torch.bfloat16).eps * scale.pick(0.5, 1)


def errors(parts: Parts, out: Tensor, sums: Tensor, step: float) -> tuple[float, str]:
    """(The greatest error of o in units of `step`, what is wrong)."""
    exact, exact_sums = merge_reference([(o.double(), lse.double()) for o, lse in parts])
    off = float(((out.double() - exact).abs() / (step * exact.abs() + 1e-6)).max())
    away = float((sums.double() - exact_sums).abs().max())
    right = off <= 1.01 and away < 1e-5  # no NaN passes
    return off, "" if right else f"o is {off:.2f} roundings off, lse {away:.1e}"

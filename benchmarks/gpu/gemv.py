"""Section gemv of `run.py`: the products of a decode step, by cuBLAS and as reductions that TorchInductor compiles.

The four of a layer of a 70B model on a rank of 8, weights [N, K] in bf16, one row. Only with coordinate descent tuning
does Inductor make reductions of such products (`mm` in torch/_inductor/decomposition.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.report import Row, Scale, compiled, read_rate

SHAPES = {"q, k, v": (1280, 8192), "o": (8192, 1024), "gate, up": (7168, 8192), "down": (8192, 3584)}
WEIGHTS = 1 << 30  # bytes of all weights of a shape, read in turns: none is in the L2 cache
LIMIT = 1e-2  # of the error, as a share of the norm: a few roundings to bf16
WAYS = ("cuBLAS", "Inductor")


def products(scale: Scale) -> None:
    rate = read_rate(scale)
    table = scale.table(
        f"Products of one row, bf16, in a CUDA graph; reading moves {rate / 1e9:.0f} GB/s",
        ("product", "N × K", "µs", "GB/s", "of reading", "error", "kernels", "result"),
    )
    for way in WAYS:
        found: list[tuple[float, int]] = []
        for name, shape in SHAPES.items():
            table.attempt(f"{name}, {way}", functools.partial(product_row, scale, rate, shape, way, found))
        if len(found) == len(SHAPES):
            seconds, nbytes = map(sum, zip(*found, strict=True))
            table.add(f"a layer's four, {way}", "", *figures(seconds, nbytes, rate), "", "")


def product_row(scale: Scale, rate: float, shape: tuple[int, int], way: str, found: list[tuple[float, int]]) -> Row:
    """`found` gets (seconds, bytes of the weight)."""
    rows, columns = shape if not scale.tiny else (16, 32)
    torch.manual_seed(rows)
    copies = max(2, scale.pick(WEIGHTS, 1) // (2 * rows * columns))
    weights = torch.randn(copies, rows, columns, device=scale.device).bfloat16()
    x = torch.randn(1, columns, device=scale.device).bfloat16()
    multiply: Callable[[Tensor, Tensor], Tensor] = F.linear
    if way == "Inductor":
        multiply = compiled(scale, lambda x, weight: F.linear(x, weight), coordinate_descent_tuning=True)
    results: list[Tensor] = []

    def run() -> None:
        results[:] = [multiply(x, weights[i]) for i in range(copies)]

    replay = scale.graph(run)
    seconds = scale.seconds(replay) / copies
    exact = x.double() @ weights[-1].double().T
    error = float((results[-1].double() - exact).norm() / exact.norm())
    names = sorted(set(scale.kernels(lambda: multiply(x, weights[0]))))
    found.append((seconds, weights[0].nbytes))
    wrong = [] if error <= LIMIT else [f"error above {LIMIT}"]
    if way == "Inductor" and names and not all(name.startswith("triton_") for name in names):
        wrong.append("no reduction of Inductor's")
    kernels = ", ".join(name[:48] for name in names) or "–"
    cells = f"{rows} × {columns}", *figures(seconds, weights[0].nbytes, rate), f"{error:.1e}", kernels
    return cells, ", ".join(wrong)


def figures(seconds: float, nbytes: int, rate: float) -> tuple[str, str, str]:
    return f"{seconds * 1e6:.1f}", f"{nbytes / seconds / 1e9:.0f}", f"{nbytes / seconds / rate:.0%}"

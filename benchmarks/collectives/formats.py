"""Errors of quantized messages: what each format loses on numbers as weights, activations and gradients are made of.

    python -m benchmarks.collectives.formats [--rows 1024]

prints three tables in Markdown (docs/figures/quantization.md holds them): relative L2 errors of one message, of the
mean over 64 ranks, and of two hops over 8 nodes of 8. On any machine, in a few minutes.
"""

from __future__ import annotations

import torch
import typer
from torch import Tensor

from benchmarks.gpu.quantize import seeds
from rewriter.kernels import (
    dequantize,
    dequantize_reduce,
    dequantize_reduce_quantize,
    parse_format,
    parse_formats,
    quantize,
)

FORMATS = ["int8", "fp8", "int6", "int4", "int4@32", "int2", "int4-hadamard", "int3-hadamard", "int2-hadamard"]
HOPS = ["int8", "int8/int4", "int8/int4-hadamard", "int4-hadamard", "int8/int3-hadamard", "int8/int2-hadamard"]
COLUMNS = 4096
NONE = ["–"]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def student(*shape: int, freedom: int = 4, seed: int = 0) -> Tensor:
    """Student's t: a normal variable over the root of a mean of squares of `freedom` others."""
    generator = torch.Generator().manual_seed(seed)
    squares = torch.randn((*shape, freedom), generator=generator).square().mean(-1)
    return torch.randn(shape, generator=generator) / squares.sqrt()


def outliers(rows: int, seed: int = 0) -> Tensor:
    """Normal, but 1 % of the columns are 20 times as large."""
    x = normal(rows, COLUMNS, seed=seed)
    x[:, torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(seed))[: round(COLUMNS / 100)]] *= 20
    return x


def correlated(ranks: int, n: int, shared: float, *, heavy: bool = False) -> Tensor:
    """[ranks, n]: a part `shared` of the variance is common to all ranks, as of the gradients of replicas."""
    make = student if heavy else normal
    return shared**0.5 * make(1, n) + (1 - shared) ** 0.5 * make(ranks, n, seed=1)


def error(y: Tensor, x: Tensor) -> float:
    """Relative L2 error."""
    return ((y.double() - x.double()).norm() / x.double().norm()).item()


def there_and_back(x: Tensor, format: str, seed: int | None = None) -> Tensor:
    return dequantize(quantize(x, format, seed=seed), format, x.shape, x.dtype, seed=seed)


def mean_over_ranks(x_PN: Tensor, format: str, *, dither: bool) -> Tensor:
    """What a receiver makes of one message of each rank, [N]."""
    ranks, n = x_PN.shape
    sent = torch.stack([quantize(x, format, seed=p if dither else None) for p, x in enumerate(x_PN)])[:, None]
    return dequantize_reduce(sent, format, n, torch.float32, seed=0 if dither else None, factor=1 / ranks)[0]


def mean_in_two_hops(x_YXN: Tensor, formats: str, *, dither: bool) -> Tensor:
    """The mean over nodes and their ranks, [N]: summed in a node, sent on in the second format, summed again."""
    first, second = parse_formats(formats)
    n = x_YXN.shape[-1]
    seed = 0 if dither else None
    sent = []
    for y, node in enumerate(x_YXN):
        inside = torch.stack([quantize(x, first, seed=r if dither else None) for r, x in enumerate(node)])[:, None]
        to_seed = y if dither else None
        sent.append(dequantize_reduce_quantize(inside, first, n, second, seed=seed, to_seed=to_seed))
    factor = 1 / x_YXN[..., 0].numel()
    return dequantize_reduce(torch.stack(sent), second, n, torch.float32, seed=seed, factor=factor)[0]


def main(rows: int = 1024) -> None:
    """Print the tables; `rows` of 4096 numbers each."""
    data = (normal(rows, COLUMNS), student(rows, COLUMNS), outliers(rows))
    print("| Format | bits | normal | Student-t(4) | outliers | dithered: normal | Student-t(4) | outliers |")
    print("|---|---|---|---|---|---|---|---|")
    for format in FORMATS:
        bits = parse_format(format).payload_bytes(1 << 20) * 8 / (1 << 20)
        cells = [f"{error(there_and_back(x, format, s), x):.4f}" for s in seeds(format, 1) for x in data]
        print(f"| {format} | {bits:.3f} | {' | '.join([*cells, *NONE * 3][:6])} |")
    n = COLUMNS * 16
    print("\n| Mean over 64 ranks | nearest, ρ 0.9 | dithered, ρ 0.9 | nearest, ρ 0.99 | dithered, ρ 0.99 |")
    print("|---|---|---|---|---|")
    for format in FORMATS:
        cells = []
        for shared in (0.9, 0.99):
            x = correlated(64, n, shared)
            nearest, *dithered = (
                f"{error(mean_over_ranks(x, format, dither=s is not None), x.mean(0)):.4f}" for s in seeds(format, 1)
            )
            cells += [nearest, *(dithered or NONE)]
        print(f"| {format} | {' | '.join(cells)} |")
    print("\n| Mean in two hops, 8 nodes of 8, Student-t(4), ρ 0.9 | nearest | dithered |")
    print("|---|---|---|")
    x = correlated(64, n, 0.9, heavy=True).view(8, 8, n)
    for formats in HOPS:
        cells = [f"{error(mean_in_two_hops(x, formats, dither=d), x.mean((0, 1))):.4f}" for d in (False, True)]
        print(f"| {formats} | {' | '.join(cells)} |")


if __name__ == "__main__":
    typer.run(main)

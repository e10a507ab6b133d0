"""Sections tiles and split of `run.py`: attention from tiles of a sequence, its errors and its time."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.report import Row, Scale, Table, short
from rewriter.ir.ops import MaskSpec
from rewriter.ir.sequence_plan import TokenRun
from rewriter.kernels import accumulation_dtype
from rewriter.runtime.attention.partial_merge import Merger
from rewriter.runtime.attention.tiles import Gradients, Visibility, tile_backward, tile_forward

CAUSAL, FULL = MaskSpec("causal"), MaskSpec("bidirectional")
# of the errors of the library's attention in the same dtype: the greatest varies more than the typical
GREATEST, TYPICAL = 2.0, 1.5


@dataclass(frozen=True)
class Case:
    """Attention of a whole sequence from the tiles of a grid."""

    name: str
    seen: Visibility
    grid: tuple[int, int]
    heads: tuple[int, int] = (8, 2)
    sizes: tuple[int, int] = (64, 64)


def cases(scale: Scale) -> Iterator[Case]:
    length = scale.pick(1021, 157)
    documents = torch.arange(length, device=scale.device) * 3 // length
    segments = torch.stack([torch.zeros_like(documents), documents])
    left = torch.tensor([length // 5, 0], device=scale.device)
    for name, spec in (("causal", CAUSAL), ("full", FULL)):
        yield Case(f"{name}, 1 × 1", Visibility(spec, length), (1, 1))
        yield Case(f"{name}, 2 × 3, offset", Visibility(spec, length), (2, 3))
    yield Case("causal, 4 × 2, no groups", Visibility(CAUSAL, length), (4, 2), (4, 4))
    yield Case("window, 2 × 2", Visibility(MaskSpec("window", length // 4), length), (2, 2))
    yield Case("padded at the left, 2 × 2", Visibility(CAUSAL, length, left), (2, 2))
    yield Case("packed, 2 × 2", Visibility(CAUSAL, length, segments=segments), (2, 2))
    yield Case("D = 192, E = 128, 2 × 2", Visibility(CAUSAL, length), (2, 2), (4, 4), (192, 128))
    yield Case("D = 72, 3 × 2", Visibility(CAUSAL, length), (3, 2), (9, 3), (72, 72))


def inputs(case: Case, device: torch.device, batch: int = 2) -> list[Tensor]:
    """q, k, v, and do, in fp64."""
    generator = torch.Generator().manual_seed(0)
    (hq, hkv), (d, e) = case.heads, case.sizes
    shapes = [(hq, d), (hkv, d), (hkv, e), (hq, e)]
    made = (torch.randn(batch, h, case.seen.length, n, generator=generator, dtype=torch.float64) for h, n in shapes)
    return [x.to(device) for x in made]


def everything(seen: Visibility, device: torch.device) -> Tensor:
    whole = TokenRun(0, 1, seen.length)
    return seen.seen(whole, whole, device)


def reference(q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Tensor, scale: float) -> list[Tensor]:
    """(o, dq, dk, dv) from all scores; rows that see nothing give 0."""
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    some = mask.any(-1, keepdim=True)
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).transpose(-1, -2) * scale
    weights = scores.masked_fill(~mask & some, -torch.inf).softmax(-1)
    o = (weights @ v.repeat_interleave(groups, 1)).masked_fill(~some, 0)
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), do)]


def library(q: Tensor, k: Tensor, v: Tensor, do: Tensor, seen: Visibility, scale: float) -> list[Tensor]:
    """The same from scaled_dot_product_attention in the dtype of the inputs.

    By a fused kernel: where there is none, it computes in fp32 whatever the dtype. So heads of one size are given, and
    those of a group are repeated on CUDA where there is a mask, and in fp32, of which no fused kernel takes groups.
    """
    groups, mask = q.shape[1] // k.shape[1], everything(seen, q.device)
    some = mask.any(-1, keepdim=True)
    plain = None if seen.simple else mask | ~some
    size = v.shape[-1]
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    every_k, every_v = k, F.pad(v, [0, k.shape[-1] - size])
    if q.is_cuda and (plain is not None or q.dtype == torch.float32):
        every_k, every_v = (x.repeat_interleave(groups, 1) for x in (every_k, every_v))
    o = F.scaled_dot_product_attention(
        *(q, every_k, every_v, None if plain is None else plain.expand(-1, q.shape[1], -1, -1)),
        is_causal=seen.simple and seen.causal,
        scale=scale,
        enable_gqa=every_k.shape[1] != q.shape[1],
    )
    o = o[..., :size].masked_fill(~some, 0)
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), do)]


def from_tiles(q: Tensor, k: Tensor, v: Tensor, do: Tensor, case: Case, scale: float) -> list[Tensor]:
    """The same from every tile of the grid, each by itself, merged; queries and keys end in padding."""
    (rows, columns), length = case.grid, case.seen.length
    total = -(-length // (rows * columns)) * rows * columns
    q, k, v, do = (F.pad(x, [0, 0, 0, total - length], value=3.0) for x in (q, k, v, do))
    into = Gradients(*(torch.zeros_like(x, dtype=accumulation_dtype(x.dtype)) for x in (q, k, v)))
    o = torch.zeros_like(do)
    for i in range(rows):
        own, merger = TokenRun(i, rows, total // rows), Merger()
        tiles = [(slice(j, None, columns), TokenRun(j, columns, total // columns)) for j in range(columns)]
        at = slice(i, None, rows)
        for t, keys in tiles:
            part = tile_forward(q[:, :, at], k[:, :, t], v[:, :, t], own, keys, case.seen, scale)
            if part is not None:
                merger.add(*part)
        o_row, lse_row = merger.result()
        o[:, :, at] = o_row.to(o.dtype)
        for t, keys in tiles:
            tile_backward(
                *(do[:, :, at], q[:, :, at], k[:, :, t], v[:, :, t], o[:, :, at], lse_row, own, keys, case.seen, scale),
                Gradients(into.dq[:, :, at], into.dk[:, :, t], into.dv[:, :, t]),
            )
    return [x[:, :, :length].to(q.dtype) for x in (o, into.dq, into.dk, into.dv)]


def factors(
    found: list[Tensor], beside: list[Tensor], exact: list[Tensor], most: tuple[float, float] = (GREATEST, TYPICAL)
) -> tuple[tuple[str, ...], str]:
    """(greatest error of each tensor, worst factor of greatest and of typical errors), what is wrong: a factor above
    those of `most`."""
    errors = [(a.double() - b).abs() for a, b in zip(found, exact, strict=True)]
    others = [(a.double() - b).abs() for a, b in zip(beside, exact, strict=True)]
    if not all(bool(x.isfinite().all()) for x in found):
        return ("not finite", "–", "–"), "not finite"
    greatest = max(float(a.max() / b.max()) for a, b in zip(errors, others, strict=True))
    typical = max(
        float(a.square().mean().sqrt() / b.square().mean().sqrt()) for a, b in zip(errors, others, strict=True)
    )
    wrong = "" if greatest <= most[0] and typical <= most[1] else f"above {most[0]} or {most[1]}"
    return (" ".join(f"{float(e.max()):.1e}" for e in errors), f"{greatest:.2f}", f"{typical:.2f}"), wrong


def tiles(scale: Scale) -> Table:
    table = scale.table(
        "Tiles, forward and backward: errors against fp64, beside scaled_dot_product_attention in the same dtype",
        ("mask, rows × columns", "dtype", "greatest error of o dq dk dv", "× greatest", "× typical", "result"),
    )
    for case in cases(scale):
        given, mask = inputs(case, scale.device), everything(case.seen, scale.device)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            table.attempt(case.name, functools.partial(tile_row, case, given, mask, dtype))
    return table


def tile_row(case: Case, given: list[Tensor], mask: Tensor, dtype: torch.dtype) -> Row:
    rounded, factor = [x.to(dtype) for x in given], case.sizes[0] ** -0.5
    exact = reference(*(x.double() for x in rounded), mask, factor)
    cells, wrong = factors(from_tiles(*rounded, case, factor), library(*rounded, case.seen, factor), exact)
    return (short(dtype), *cells), wrong


def splitting(scale: Scale) -> Table:
    table = scale.table(
        "Tiles of uneven grids, causal, bf16: a kernel call for each pair of classes, time per visible score",
        ("rows × columns", "queries × keys", "forward ps", "backward ps", "× forward", "× backward", "result"),
    )
    length, heads, size = scale.pick((12288, (16, 4), 128), (48, (4, 2), 16))
    base: list[float] = []
    for rows, columns in ((2, 2), (2, 3), (3, 2), (4, 2), (1, 4)):
        queries, keys = TokenRun(1 % rows, rows, length // rows), TokenRun(0, columns, length // columns)
        table.attempt(f"{rows} × {columns}", functools.partial(split_row, scale, queries, keys, heads, size, base))
    return table


def split_row(
    scale: Scale, queries: TokenRun, keys: TokenRun, heads: tuple[int, int], size: int, base: list[float]
) -> Row:
    """Times of one tile; `base` holds those of the first."""
    length, factor = queries.count * queries.step, size**-0.5
    seen, visible = Visibility(CAUSAL, length), count_visible(queries, keys) * heads[0]
    shapes = [(heads[0], queries), (heads[1], keys), (heads[1], keys), (heads[0], queries)]
    q, k, v, do = (torch.randn(1, h, run.count, size, device=scale.device).bfloat16() for h, run in shapes)
    part = tile_forward(q, k, v, queries, keys, seen, factor)
    assert part is not None
    o, lse = part[0].bfloat16(), part[1]
    into = Gradients(*(torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)))
    found = [
        scale.seconds(lambda: tile_forward(q, k, v, queries, keys, seen, factor)) / visible,
        scale.seconds(lambda: tile_backward(do, q, k, v, o, lse, queries, keys, seen, factor, into)) / visible,
    ]
    base.extend(() if base else found)
    cost = [a / b for a, b in zip(found, base, strict=True)]
    cells = *(f"{time * 1e12:.2f}" for time in found), *(f"{c:.2f}" for c in cost)
    return (f"{queries.count} × {keys.count}", *cells), ""


def count_visible(queries: TokenRun, keys: TokenRun) -> int:
    """How many scores of the tile are visible under a causal mask."""
    before = (queries.positions() - keys.start).div(keys.step, rounding_mode="floor") + 1
    return int(before.clamp(0, keys.count).sum())

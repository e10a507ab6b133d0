"""Section kernels of `run.py`: every Triton kernel of the package beside its specification, bf16, one size each.

Those of quantized messages, of merged attention parts, of a new token's attention, of stored weights, and the one that
passes time in place of a collective. They are compiled beforehand (see compile.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu import emulated as gpu_emulated
from benchmarks.gpu import merge as gpu_merge
from benchmarks.gpu import quantize as gpu_quantize
from benchmarks.gpu.compile import compiled_beforehand
from benchmarks.gpu.report import Row, Scale, Table
from rewriter.kernels import stored_weights, stored_weights_triton
from rewriter.kernels.decode_attention import decode_attention_reference

LIMIT = 1e-2  # of an attention's error, as a share of the norm: a few roundings to bf16
HOLDS = (20e-6, 200e-6)  # seconds


@dataclass(frozen=True)
class Case:
    """A row: `found(scale)` returns a figure, and what is wrong."""

    name: str
    found: Callable[[Scale], tuple[str, str]]

    def run(self, scale: Scale) -> Row:
        figure, wrong = self.found(scale)
        return (figure,), wrong


def cases() -> list[Case]:
    """Those first on which generated tokens rely."""
    attentions = {
        "": {},
        ", padded, in a window of 1,000": {"window": 1000, "padded": True},
        ", with a softcap and sinks": {"softcap": 30.0, "sinks": True},
    }
    found = [Case(f"attention of a token{of}", functools.partial(attention, **how)) for of, how in attentions.items()]
    found += [Case("merged parts of attention, 4", merged)]
    found += [
        Case(f"stored weights, {name}", functools.partial(stored, scheme=name))
        for name in ("fp8 e4m3", "fp8 e5m2", "mxfp4")
    ]
    found += [Case(f"a collective of {1e6 * s:.0f} µs", functools.partial(held, seconds=s)) for s in HOLDS]
    for format in gpu_quantize.FORMATS:
        for seed in (None, (1 << 40) + 5) if format in ("int8", "int4") else (None,):
            how = "" if seed is None else ", dithered"
            found.append(Case(f"messages, {format}{how}", functools.partial(message, format=format, seed=seed)))
    return found


def checking(scale: Scale) -> Table:
    table = scale.table("Triton kernels beside their specifications, bf16", ("kernel", "found", "result"))
    compiled_beforehand(scale, "benchmarks.gpu.kernels", len(cases()))
    for case in cases():
        table.attempt(case.name, functools.partial(case.run, scale))
    return table


def attention(
    scale: Scale, window: int | None = None, softcap: float | None = None, padded: bool = False, sinks: bool = False
) -> tuple[str, str]:
    """Two rows of 16 query heads on 2 key/value heads, at a position in the middle of the cache. What is not seen is
    NaN."""
    from rewriter.kernels.decode_attention_triton import launch

    torch.manual_seed(0)
    keys, size = scale.pick(4096, 96), scale.pick(128, 16)
    at = keys * 3 // 4
    q = torch.randn(2, 16, 1, size, device=scale.device).bfloat16()
    k, v = (torch.randn(2, 2, keys, size, device=scale.device).bfloat16() for _ in range(2))
    k[:, :, at + 1 :] = v[:, :, at + 1 :] = torch.nan
    position = torch.tensor(at, device=scale.device)
    first = torch.tensor([at // 3, 0], device=scale.device) if padded else None
    extra = torch.randn(16, device=scale.device) if sinks else None
    window = None if window is None else scale.pick(window, 24)
    given = (q, k, v, position, first, extra, size**-0.5, window, softcap)
    found = launch(*given, *(() if scale.cuda else (3,)))  # on a GPU as many splits as suit it
    exact = decode_attention_reference(
        q.double(), k.nan_to_num().double(), v.nan_to_num().double(), position, first,
        scale=size**-0.5, window=window, softcap=softcap, sinks_H=None if extra is None else extra.double(),
    )  # fmt: skip
    error = float((found.double() - exact).norm() / exact.norm())
    return f"error {error:.1e}", "" if error <= LIMIT else f"above {LIMIT}"


def merged(scale: Scale) -> tuple[str, str]:
    off, wrong = gpu_merge.errors(*gpu_merge.launched(scale, scale.pick((1, 32, 4096, 128), (1, 2, 9, 16)), 4))
    return f"{off:.2f} × rounding", wrong


def stored(scale: Scale, scheme: str) -> tuple[str, str]:
    """Every code, in rows and columns that blocks of 128 do not divide."""
    torch.manual_seed(0)
    rows, columns = scale.pick((576, 1088), (24, 40))
    block = scale.pick(128, 16)
    if scheme == "mxfp4":
        blocks = torch.arange(rows * 16, device=scale.device).remainder(256).to(torch.uint8).view(rows, 1, 16)
        scales = (120 + torch.arange(rows, device=scale.device) % 16).to(torch.uint8)[:, None]
        found = stored_weights_triton.mxfp4(blocks, scales, torch.bfloat16)
        expected = stored_weights.mxfp4(blocks, scales)
    else:
        dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[scheme.split()[1]]
        codes = torch.arange(rows * columns, device=scale.device).remainder(256).to(torch.uint8).view(rows, columns)
        grid = -(-rows // block), -(-columns // block)
        scales = torch.rand(grid, device=scale.device).bfloat16() + 0.5
        found = stored_weights_triton.fp8(codes.view(dtype), scales, (block, block), torch.bfloat16)
        expected = stored_weights.fp8(codes.view(dtype), scales, (block, block))
    return compared(found, expected, scale)


def compared(found: Tensor, expected: Tensor, scale: Scale) -> tuple[str, str]:
    """Numbers that differ from fp32 ones rounded to bf16; the interpreter cuts off, where a GPU rounds."""
    slack = torch.finfo(torch.bfloat16).eps * expected.abs() if scale.tiny else 0.0
    near = (found.float() - expected.bfloat16().float()).abs() <= slack
    equal = near | (found == expected.bfloat16()) | (found.isnan() & expected.isnan())
    differ = int((~equal).sum())
    return f"{differ} of {found.numel()} differ", "other numbers" if differ else ""


def held(scale: Scale, seconds: float) -> tuple[str, str]:
    (_, found), wrong = gpu_emulated.graphed(scale, seconds)
    return str(found), wrong


def message(scale: Scale, format: str, seed: int | None) -> tuple[str, str]:
    case = gpu_quantize.Case(format, torch.bfloat16, seed, gpu_quantize.SPARE[0])
    (*_, codes, scales, numbers, sums), wrong = case.run(scale)
    return f"differ: codes {codes}, scales {scales}, numbers {numbers}; sums {sums}", wrong

"""Runs the kernels that merge attention, and those that dequantize stored weights, in Triton's interpreter and prints
their errors as JSON: in a separate process, since Triton reads TRITON_INTERPRET when a kernel is defined. Started by
tests/unit/kernels/test_kernels.py."""

from __future__ import annotations

import json

import torch
from torch import Tensor

from rewriter.kernels import stored_weights, stored_weights_triton
from rewriter.kernels.merge import merge_reference
from rewriter.kernels.merge_triton import launch

SHAPES = [(1, 1, 1, 1), (2, 3, 5, 8), (1, 4, 37, 64), (2, 2, 33, 80), (1, 2, 3, 256)]
COUNTS = [1, 2, 3, 5]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def parts(shape: tuple[int, ...], count: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Partial outputs, of which some rows saw nothing in one part, and the last row in none."""
    made = []
    for p in range(count):
        o, lse = torch.randn(shape).to(dtype), torch.randn(shape[:-1]) * 10 + 100
        rows, sums = o.flatten(0, 2), lse.flatten()
        for blind in [*range(p, len(rows) - 1, count + 1), len(rows) - 1]:
            rows[blind], sums[blind] = 0, -torch.inf
        made.append((o, lse))
    return made


def error(made: list[tuple[Tensor, Tensor]], out: Tensor) -> float:
    """The largest relative error of o, after rounding to out's dtype, and of lse; infinite where −inf is misplaced."""
    lse = torch.full(out.shape[:-1], torch.nan)
    launch(made, out, lse)
    o, sums = merge_reference([(o.double(), part.double()) for o, part in made])
    if not torch.equal(lse == -torch.inf, sums == -torch.inf) or not bool((out[sums == -torch.inf] == 0).all()):
        return float("inf")
    # the interpreter cuts bf16 off, where a GPU rounds (the test of compiled code looks for that): a whole step
    step = torch.finfo(out.dtype).eps * (1 if out.dtype == torch.bfloat16 else 0.5)
    rounding = float(((out.double() - o).abs() - step * o.abs()).clamp(min=0).max()) / max(float(o.abs().max()), 1e-30)
    return max(rounding, float((lse.double() - sums).nan_to_num(0, neginf=0).abs().max()) / 100)


def merged() -> dict[str, float]:
    """Errors against fp64, by case."""
    torch.manual_seed(0)
    found: dict[str, float] = {}
    for name, dtype in DTYPES.items():
        for shape in SHAPES:
            for count in COUNTS:
                key = f"{name} {'x'.join(map(str, shape))} of {count}"
                found[key] = error(parts(shape, count, dtype), torch.empty(shape, dtype=dtype))
    # what happens in a rank: its own part in fp32 and a strided view, others in bf16, in the message they came in
    own, *others = parts((2, 4, 22, 16), 3, torch.bfloat16)
    wide = torch.randn(2, 4, 44, 16), torch.randn(2, 4, 44)
    wide[0][:, :, 1::2], wide[1][:, :, 1::2] = own[0].float(), own[1]
    message = torch.cat([x.flatten().view(torch.uint8) for lse_o in others for x in reversed(lse_o)])
    sizes = [others[0][1].nbytes, others[0][0].nbytes] * 2
    sums_0, o_0, sums_1, o_1 = message.split(sizes)
    arrived = [
        (o.view(torch.bfloat16).view(2, 4, 22, 16), sums.view(torch.float32).view(2, 4, 22))
        for o, sums in ((o_0, sums_0), (o_1, sums_1))
    ]
    made = [(wide[0][:, :, 1::2], wide[1][:, :, 1::2]), *arrived]
    found["mixed dtypes, a stride, parts in a message"] = error(made, torch.empty(2, 4, 22, 16, dtype=torch.bfloat16))
    transposed = [(o.transpose(-1, -2).contiguous().transpose(-1, -2), lse) for o, lse in others]
    found["a part whose rows are not contiguous"] = error(transposed, torch.empty(2, 4, 22, 16))
    guarded = torch.full((1, 1, 5, 12), 7.0)
    found["nothing beyond the end"] = error(parts((1, 1, 3, 12), 2, torch.float32), guarded[:, :, 1:4])
    found["nothing beyond the end"] += float((guarded[:, :, ::4] != 7).sum())
    return found


CODES = torch.arange(256).to(torch.uint8)
FP8 = [
    ((37, 50), (16, 16)),
    ((64, 256), (128, 128)),
    ((40, 130), (1, 130)),
    ((33, 64), (33, 64)),
    ((3, 48, 40), (1, 16, 8)),
]


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, in steps of the dtype; infinite where one is not a number and the other is."""
    if not torch.equal(found.isnan(), expected.isnan()) or not torch.equal(found.isinf(), expected.isinf()):
        return float("inf")
    # the interpreter cuts bf16 off where a GPU rounds
    step = 0.0 if found.dtype == torch.float32 else torch.finfo(found.dtype).eps
    apart = (found.double() - expected.double()).abs() - step * expected.double().abs()
    return float(apart.nan_to_num(0, 0, 0).clamp(min=0).max())


def dequantized() -> dict[str, float]:
    """Differences from plain PyTorch, by case."""
    torch.manual_seed(0)
    found: dict[str, float] = {}
    for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
        every, one = CODES.view(16, 16).view(kind), torch.ones(1, 1)
        made = stored_weights_triton.fp8(every, one, (16, 16), torch.float32)
        found[f"every code of {kind}"] = difference(made, stored_weights.fp8(every, one, (16, 16)))
    for name, dtype in DTYPES.items():
        for shape, per in FP8:
            codes = torch.randn(shape).to(torch.float8_e4m3fn)
            grid = [-(-size // count) for size, count in zip(shape, per, strict=True)]
            for scales in (torch.rand(grid) + 0.5, torch.randint(120, 134, grid).to(torch.uint8)):
                made = stored_weights_triton.fp8(codes, scales, per, dtype)
                expected = stored_weights.fp8(codes, scales, per).to(dtype)
                found[f"{name} {shape} in blocks of {per}, scales {scales.dtype}"] = difference(made, expected)
        blocks, scales = torch.randint(256, (2, 9, 5, 16)).to(torch.uint8), torch.randint(118, 134, (2, 9, 5))
        exponents = scales.to(torch.uint8)
        made = stored_weights_triton.mxfp4(blocks, exponents, dtype)
        found[f"mxfp4 {name}"] = difference(made, stored_weights.mxfp4(blocks, exponents).to(dtype))
    return found


if __name__ == "__main__":
    print(json.dumps({"merged": merged(), "dequantized": dequantized()}))

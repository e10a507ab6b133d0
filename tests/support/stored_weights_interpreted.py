"""Runs the kernels that dequantize in Triton's interpreter and prints their differences from plain PyTorch as JSON: a
process of its own, since Triton reads TRITON_INTERPRET when a kernel is defined. Started by test_kernels.py."""

from __future__ import annotations

import json

import torch

from rewriter.kernels import stored_weights, stored_weights_triton

CODES = torch.arange(256).to(torch.uint8)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
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


def main() -> None:
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
    print(json.dumps(found))


if __name__ == "__main__":
    main()

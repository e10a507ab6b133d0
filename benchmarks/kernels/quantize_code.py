"""The kernels of quantized messages as a launch would compile them, for GPUs that need not be here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.kernels.merge_code import Code, build
from rewriter.kernels import parse_format

KERNELS = ("quantize_kernel", "dequantize_kernel", "sum_kernel")
OPTIONS = ("num_warps", "maxnreg", "enable_fp_fusion")
TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
}
ROWS, LENGTH = 2, 1 << 20  # of the tensors in a launch; longer and odd ones are the same kernel


class Recorded:
    """Stands for a kernel and keeps what it is launched with."""

    def __init__(self) -> None:
        self.arguments: tuple[Any, ...] = ()
        self.keywords: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.launch

    def launch(self, *arguments: Any, **keywords: Any) -> None:
        self.arguments, self.keywords = arguments, keywords


def compiled(call: Callable[[], object], capability: int) -> Code:
    """The kernel that `call`, a launch of `quantize_triton`, starts: the same types, constants and alignments."""
    from triton.compiler import ASTSource

    from rewriter.kernels import quantize_triton

    kernels = {name: getattr(quantize_triton, name) for name in KERNELS}
    records = {name: Recorded() for name in KERNELS}
    try:
        for name, record in records.items():
            setattr(quantize_triton, name, record)
        call()
    finally:
        for name, kernel in kernels.items():
            setattr(quantize_triton, name, kernel)
    (name,) = (name for name, record in records.items() if record.keywords)
    kernel, record = kernels[name], records[name]
    options = {key: value for key, value in record.keywords.items() if key in OPTIONS}
    constants = {key: value for key, value in record.keywords.items() if key not in OPTIONS}
    types: dict[str, str] = dict.fromkeys(constants, "constexpr")
    aligned = []
    for at, (parameter, value) in enumerate(zip(kernel.params, record.arguments, strict=False)):
        if value is None:
            constants[parameter.name], types[parameter.name] = None, "constexpr"
        elif isinstance(value, torch.Tensor):
            types[parameter.name] = TYPES[value.dtype]
            aligned.append(at)
        else:
            types[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize:
                aligned.append(at)
    source = ASTSource(
        fn=kernel,
        signature={parameter.name: types[parameter.name] for parameter in kernel.params},
        constexprs=constants,
        attrs={(at,): [["tt.divisibility", 16]] for at in aligned},
    )
    return build(source, capability, options)


def quantizing(name: str, dtype: torch.dtype, capability: int, seed: int | None = None) -> Code:
    from rewriter.kernels import quantize_triton

    format = parse_format(name)
    x = torch.empty(ROWS, LENGTH, dtype=dtype)
    out = torch.empty(ROWS, format.payload_bytes(LENGTH), dtype=torch.uint8)
    return compiled(lambda: quantize_triton.quantize_rows(x, format, [1, 0], seed, out), capability)


def dequantizing(name: str, dtype: torch.dtype, capability: int, seed: int | None = None) -> Code:
    from rewriter.kernels import quantize_triton

    format = parse_format(name)
    payload = torch.empty(ROWS, format.payload_bytes(LENGTH), dtype=torch.uint8)
    out = torch.empty(ROWS, LENGTH, dtype=dtype)
    return compiled(lambda: quantize_triton.dequantize_rows(payload, format, LENGTH, seed, out), capability)


def reducing(name: str, dtype: torch.dtype, capability: int, seed: int | None = None) -> Code:
    from rewriter.kernels import quantize_triton

    format = parse_format(name)
    payload = torch.empty(4, ROWS, format.payload_bytes(LENGTH), dtype=torch.uint8)
    own, out = torch.empty(ROWS, LENGTH, dtype=dtype), torch.empty(ROWS, LENGTH, dtype=dtype)
    return compiled(
        lambda: quantize_triton.dequantize_reduce(payload, format, LENGTH, seed, 1, own, 0.25, out), capability
    )


def requantizing(name: str, to_name: str, dtype: torch.dtype, capability: int, seed: int | None = None) -> Code:
    from rewriter.kernels import quantize_triton

    format, to = parse_format(name), parse_format(to_name)
    payload = torch.empty(4, ROWS, format.payload_bytes(LENGTH), dtype=torch.uint8)
    own = torch.empty(ROWS, LENGTH, dtype=dtype)
    out = torch.empty(ROWS, to.payload_bytes(LENGTH), dtype=torch.uint8)
    return compiled(
        lambda: quantize_triton.dequantize_reduce(
            payload, format, LENGTH, seed, 1, own, 0.25, out, to=to, to_seed=seed, order=[1, 0]
        ),
        capability,
    )


def elements(*names: str) -> int:
    """Of a thread in a tile."""
    from rewriter.kernels import quantize_triton

    formats = [parse_format(name) for name in names]
    return quantize_triton.tile_of(*formats).K * formats[0].block // (32 * quantize_triton.WARPS)

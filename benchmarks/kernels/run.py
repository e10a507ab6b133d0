"""Rates of the kernels: `python -m benchmarks.kernels.run`.

On a GPU: bytes per second of every kernel as a part of what a copy on the device moves in the same run, fused kernels
beside the same in several, and beside `torch.compile` of the specification. Without one: what the kernels compile to
for GPUs that are not here, and how fast the specification is on a core of this CPU.
"""

from __future__ import annotations

import sys

import torch

from benchmarks.gpu.merge import merging
from benchmarks.gpu.quantize import BY_128 as FORMATS
from benchmarks.gpu.quantize import rates, rates_compiled, seeds
from benchmarks.gpu.report import Scale, Table
from benchmarks.kernels.merge_code import ARCHITECTURES, Code
from benchmarks.kernels.quantize_code import dequantizing, elements, quantizing, reducing, requantizing
from rewriter.kernels import dequantize_reduce, dequantize_rows, parse_format, quantize_rows

BF16 = torch.bfloat16


def code() -> Table:
    """Registers and spilled bytes of a thread, and, of a tile without masks, accesses and instructions."""
    table = Table(
        "bf16 numbers, blocks of 128, as compiled",
        ("architecture", "kernel", "registers", "spilled", "loads", "stores", "instructions per element", "result"),
    )
    for capability in ARCHITECTURES:
        for name in FORMATS:
            for seed in seeds(name, 1):
                how = "" if seed is None else ", dithered"
                add(table, capability, f"quantize {name}{how}", quantizing(name, BF16, capability, seed), name)
                add(table, capability, f"dequantize {name}{how}", dequantizing(name, BF16, capability, seed), name)
        for name in ("int8", "int4", "int4-hadamard"):
            add(table, capability, f"sum of {name}", reducing(name, BF16, capability), name)
        for name, to in (("int8", "int4"), ("int8", "int4-hadamard")):
            add(table, capability, f"sum of {name}, to {to}", requantizing(name, to, BF16, capability), name, to)
    return table


def add(table: Table, capability: int, what: str, compiled: Code, *formats: str) -> None:
    spilled = compiled.stack + compiled.local
    accesses = (
        ", ".join(f"{count} × {width}" for width, count in sorted(compiled.widths(access).items(), reverse=True))
        for access in ("LDG", "STG")
    )
    each = len(compiled.fast_path()) / elements(*formats)
    wrong = f"{spilled} bytes spilled" if spilled else ""
    table.add(f"sm_{capability}", what, compiled.registers, spilled, *accesses, f"{each:.1f}", wrong=wrong)


def on_cpu() -> Table:
    """The specification, one thread."""
    torch.set_num_threads(1)
    scale = Scale(torch.device("cpu"), False)
    table = Table(
        "The specification on one core, bf16: 10⁶ numbers per second",
        ("format", "quantize", "dequantize", "sum of 4", "dithered quantize", "dequantize", "result"),
    )
    x = torch.randn(1, 1 << 22).to(BF16)
    n = x.shape[1]
    for name in FORMATS:
        format = parse_format(name)
        found = []
        for seed in seeds(name, 1):
            payload = quantize_rows(x, format, seed=seed)
            calls = [
                lambda format=format, seed=seed: quantize_rows(x, format, seed=seed),
                lambda format=format, seed=seed, sent=payload: dequantize_rows(sent, format, n, BF16, seed=seed),
            ]
            if seed is None:
                four = payload.expand(4, 1, -1)
                calls.append(lambda format=format, sent=four: dequantize_reduce(sent, format, n, BF16))
            found += [n / scale.seconds(call, 3) / 1e6 for call in calls]
        table.add(name, *[*(f"{rate:.0f}" for rate in found), "–", "–"][:5])
    return table


def main() -> None:
    if torch.cuda.is_available():
        scale = Scale(torch.device("cuda"), False)
        tables = [rates(scale), rates_compiled(scale), merging(scale)]
    else:
        tables = [code(), on_cpu()]
    print("\n".join(table.markdown() for table in tables))
    sys.exit(1 if any(table.failed for table in tables) else 0)


if __name__ == "__main__":
    main()

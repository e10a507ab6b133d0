"""Sections quantize, rates, rates-by-size and rates-compiled of `run.py`: the kernels of quantized messages against
their specification on the device, and what they move in a second beside a copy, beside the same in several kernels, and
beside `torch.compile`."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.compile import compiled_beforehand
from benchmarks.gpu.report import Row, Scale, Table, compiled, copy_rate, short
from rewriter.kernels import (
    Format,
    dequantize_reduce,
    dequantize_reduce_quantize,
    dequantize_rows,
    parse_format,
    quantize_rows,
)

BY_128 = ("int8", "int6", "int4", "int2", "fp8", "int4-hadamard", "int3-hadamard", "int2-hadamard")
FORMATS = (*BY_128, "int4@32", "int8@1024")
SPECIAL = 6  # blocks, see `numbers`
SENDERS = 4
# Elements of a last, incomplete block. Where rows are multiples of 16 long, as a model's are, Triton compiles accesses
# of 16 bytes, else one for each element: two kernels.
SPARE = (48, 33)
# the module; the package has a function of its name
specification = importlib.import_module("rewriter.kernels.quantize")


def seeds(format: str, seed: int) -> tuple[int | None, ...]:
    """None, to the nearest level, and `seed` where messages of the format can be dithered."""
    return (None,) if parse_format(format).floating else (None, seed)


@dataclass(frozen=True)
class Case:
    """A row of the section quantize."""

    format: str
    dtype: torch.dtype
    seed: int | None
    spare: int

    def run(self, scale: Scale) -> Row:
        return check_row(scale, parse_format(self.format), self.dtype, self.seed, self.spare)


def cases() -> list[Case]:
    """bf16 first, which is what models send."""
    return [
        Case(name, dtype, seed, spare)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for name in FORMATS
        for seed in seeds(name, (1 << 40) + 5)
        for spare in (SPARE if dtype == torch.bfloat16 else SPARE[:1])
    ]


def quantizing(scale: Scale) -> Table:
    table = scale.table(
        "Quantized messages: kernels against their specification on the CPU",
        (
            "format",
            "dtype",
            "length",
            "rounding",
            "codes that differ",
            "scales that differ",
            "numbers",
            "sums",
            "result",
        ),
    )
    compiled_beforehand(scale, "benchmarks.gpu.quantize", len(cases()))
    for case in cases():
        table.attempt(case.format, functools.partial(case.run, scale))
    return table


def numbers(n: int, block: int, dtype: torch.dtype) -> Tensor:
    """[3, n]: normal ones, of which the first blocks are zeros, ± the largest, denormal, a lone one, inf and NaN."""
    x = torch.randn(3, n)
    info = torch.finfo(dtype)
    sign = x[0].sign()
    lone = torch.zeros(n)
    lone[5::block] = info.max
    denormal = sign * info.smallest_normal / 64
    for i, kind in enumerate((torch.zeros(n), sign * info.max, denormal, lone, torch.inf * sign, torch.nan * sign)):
        x[:, i * block : (i + 1) * block] = kind[i * block : (i + 1) * block]
    return x.to(dtype)


def check_row(scale: Scale, format: Format, dtype: torch.dtype, seed: int | None, spare: int) -> Row:
    torch.manual_seed(format.bits)
    n = scale.pick(100, 10) * format.block + spare
    x = numbers(n, format.block, dtype)
    order = [2, 0, 1]
    with kernels(scale):
        got = quantize_rows(x.to(scale.device), format, order=order, seed=seed).cpu()
    expected = quantize_rows(x, format, order=order, seed=seed)
    # all numbers of the block of the largest ones may lie between two levels
    codes, scales = differences(got, expected, format, n, SPECIAL)
    with kernels(scale):
        y = dequantize_rows(expected.to(scale.device), format, n, dtype, seed=seed).cpu()
    z = dequantize_rows(expected, format, n, dtype, seed=seed)
    # the interpreter cuts bf16 off, where a GPU rounds
    slack = torch.finfo(dtype).eps * z.double().abs() if scale.tiny and dtype == torch.bfloat16 else 0.0
    fine = ((y.double() - z.double()).abs() <= slack) | (y.isnan() & z.isnan())
    wrong_numbers = int((~fine).sum())

    sent = torch.stack([quantize_rows(torch.randn(3, n), format, seed=seed) for _ in range(SENDERS)])
    own = torch.randn(3, n).to(dtype)
    arguments = {"seed": seed, "skip": 1, "factor": 0.25}
    with kernels(scale):
        total = dequantize_reduce(
            sent.to(scale.device), format, n, torch.float32, add=own.to(scale.device), **arguments
        ).cpu()
        to = Format(8, block=format.block)
        again = dequantize_reduce_quantize(
            sent.to(scale.device), format, n, to, add=own.to(scale.device), order=order, **arguments
        ).cpu()
    exact = dequantize_reduce(sent, format, n, torch.float32, add=own, **arguments)
    off = float((total - exact).norm() / exact.norm())
    planes = to.block_bytes * to.blocks(n)
    moved = (again != quantize_rows(exact, to, order=order))[:, :planes].double().mean().item()

    rotated = 1e-4 if format.rotated else 0.0
    wrong = [
        f"{what} {found:.1e}"
        for what, found, limit in (
            ("codes", codes, rotated),
            ("scales", scales, 1e-2 * format.rotated),
            ("numbers", wrong_numbers, 0.0),
            ("sums", off, 1e-6 * format.rotated),
            ("sums sent on", moved, rotated),
        )
        if not found <= limit
    ]
    rounding = "nearest" if seed is None else "dithered"
    cells = short(dtype), n, rounding, f"{codes:.1e}", f"{scales:.1e}", wrong_numbers, f"{off:.1e}"
    return cells, ", ".join(wrong)


def differences(got: Tensor, expected: Tensor, format: Format, n: int, normal: int = 0) -> tuple[float, float]:
    """Which part of codes differs, and of scales, from the block `normal` on; 1 where any differs by more than a step,
    or, where nothing is rotated, at all."""
    found = []
    for payload in (got, expected):
        planes, scales, _ = specification._parts(payload, format, format.blocks(n))
        codes = specification._unpack([plane.clone() for plane in planes], format)
        found.append((codes.int(), scales.int() & 0xFFFF))
    parts = []
    for a, b in zip(*found, strict=True):
        away = (a - b).abs()
        part = (away[:, normal:] > 0).double().mean().item()
        parts.append(1.0 if away.max() > format.rotated else part)
    return parts[0], parts[1]


@contextmanager
def kernels(scale: Scale) -> Iterator[None]:
    """In a dry run the interpreter's: on the CPU the functions would choose the specification."""
    chosen = specification._kernels
    if scale.tiny:
        from rewriter.kernels import quantize_triton

        specification._kernels = lambda x, *formats: quantize_triton
    try:
        yield
    finally:
        specification._kernels = chosen


def rates(scale: Scale, compiler: bool = False) -> Table:
    """Every kernel on bf16 numbers; a block of 128. `compiler`: only those that have a `torch.compile` beside them,
    and that."""
    rate = copy_rate(scale)
    table = scale.table(
        f"Quantized messages, bf16{', beside torch.compile' * compiler}: bytes read and written in a second; a copy "
        f"moves {rate / 1e9:.0f} GB/s",
        ("kernel", "µs", "GB/s", "of a copy", "beside it", "its µs", "result"),
    )
    rows, n = scale.pick((8, 1 << 24), (2, 256))
    x = torch.randn(rows, n, device=scale.device).bfloat16()
    for name in BY_128:
        for seed in seeds(name, 3):
            how, given = "" if seed is None else ", dithered", (scale, rate, x, name, seed, compiler)
            table.attempt(f"quantize {name}{how}", functools.partial(quantize_rate, *given))
            table.attempt(f"dequantize {name}{how}", functools.partial(dequantize_rate, *given))
    if compiler:
        return table
    table.attempt("quantize int4, rows reordered", functools.partial(reorder_rate, scale, rate, x))
    for name in ("int8", "int4", "int4-hadamard"):
        table.attempt(f"sum of {rows} {name}", functools.partial(sum_rate, scale, rate, x, name))
    for name, to in (("int8", "int4"), ("int8", "int4-hadamard"), ("int4-hadamard", "int4-hadamard")):
        table.attempt(f"sum of {rows} {name}, to {to}", functools.partial(send_on_rate, scale, rate, x, name, to))
    return table


def rates_by_size(scale: Scale) -> Table:
    """Of messages of 8 to 256 MiB, those of a prefill layer among them."""
    rate = copy_rate(scale)
    table = scale.table(
        f"Quantized messages, bf16, by size: bytes read and written in a second; a copy moves {rate / 1e9:.0f} GB/s",
        ("kernel", "µs", "GB/s", "of a copy", "result"),
    )
    for mebibytes in scale.pick((8, 64, 256), (1,)):
        rows, n = scale.pick((8, mebibytes << 16), (2, 256))
        x = torch.randn(rows, n, device=scale.device).bfloat16()
        for name in ("int8", "int4", "int4-hadamard"):
            for what, found in (("quantize", quantize_rate), ("dequantize", dequantize_rate)):
                given = scale, rate, x, name, None, False
                alone = functools.partial(without_others, found, given)
                table.attempt(f"{what} {name}, {mebibytes} MiB", alone)
    return table


def without_others(found: Callable[..., Row], given: tuple[object, ...]) -> Row:
    """A row of `rates` without what stands beside it."""
    cells, wrong = found(*given)
    return cells[:3], wrong


def rates_compiled(scale: Scale) -> Table:
    return rates(scale, compiler=True)


def row(scale: Scale, rate: float, moved: int, call: Callable[[], object], other: str = "", beside: str = "") -> Row:
    with kernels(scale):
        seconds = scale.seconds(call)
    times = f"{seconds * 1e6:.0f}", f"{moved / seconds / 1e9:.0f}", f"{moved / seconds / rate:.0%}"
    return (*times, other, beside), ""


def by_compiler(scale: Scale, call: Callable[..., object], x: Tensor, *rest: object) -> str:
    """µs of `torch.compile` of a function of the specification, which here has all of x at a time; or its error."""
    piece = specification._PIECE
    try:
        specification._PIECE = x.numel()
        fast = compiled(scale, call)
        return f"{scale.seconds(lambda: fast(x, *rest), 5) * 1e6:.0f}"
    except torch._dynamo.exc.BackendCompilerFailed as error:  # what stands beside the kernel; the kernel has a row
        return f"fails: {str(error).strip().splitlines()[-1] or type(error).__name__}"
    finally:
        specification._PIECE = piece


def quantize_rate(scale: Scale, rate: float, x: Tensor, name: str, seed: int | None, compiler: bool) -> Row:
    format = parse_format(name)
    out = torch.empty(len(x), format.payload_bytes(x.shape[1]), dtype=torch.uint8, device=x.device)
    compile_specification = functools.partial(by_compiler, scale, specification._quantize_rows, x, format, seed, out)
    beside = ("torch.compile", compile_specification()) if compiler else ()
    call = functools.partial(quantize_rows, x, format, seed=seed, out=out)
    return row(scale, rate, x.nbytes + out.nbytes, call, *beside)


def dequantize_rate(scale: Scale, rate: float, x: Tensor, name: str, seed: int | None, compiler: bool) -> Row:
    format = parse_format(name)
    payload = quantize_rows(x, format, seed=seed)
    out = torch.empty_like(x)

    def reference(payload: Tensor, out: Tensor) -> None:
        specification._dequantize_rows(payload, format, x.shape[1], seed, out)

    beside = ("torch.compile", by_compiler(scale, reference, payload, out)) if compiler else ()
    call = functools.partial(dequantize_rows, payload, format, x.shape[1], x.dtype, seed=seed, out=out)
    return row(scale, rate, payload.nbytes + out.nbytes, call, *beside)


def reorder_rate(scale: Scale, rate: float, x: Tensor) -> Row:
    order = [*range(1, len(x), 2), *range(0, len(x), 2)]
    index = torch.tensor(order, device=x.device)
    out = quantize_rows(x, "int4")
    with kernels(scale):
        apart = scale.seconds(lambda: quantize_rows(x.index_select(0, index), "int4", out=out))
    call = functools.partial(quantize_rows, x, "int4", order=order, out=out)
    return row(scale, rate, x.nbytes + out.nbytes, call, "reordered first", f"{apart * 1e6:.0f}")


def sum_rate(scale: Scale, rate: float, x: Tensor, name: str) -> Row:
    """x's rows are the senders' messages, the first one's own."""
    format, n = parse_format(name), x.shape[1]
    sent = quantize_rows(x, format)[:, None]
    own = x[:1]

    def apart() -> Tensor:
        return dequantize_rows(sent[1:, 0], format, n, torch.float32).sum(0) + own

    with kernels(scale):
        other = f"{scale.seconds(apart) * 1e6:.0f}"
    call = functools.partial(dequantize_reduce, sent, format, n, x.dtype, skip=0, add=own)
    moved = sent[1:].nbytes + 2 * own.nbytes
    return row(scale, rate, moved, call, "dequantized, then summed", other)


def send_on_rate(scale: Scale, rate: float, x: Tensor, name: str, to_name: str) -> Row:
    format, to, n = parse_format(name), parse_format(to_name), x.shape[1]
    sent = quantize_rows(x, format)[:, None]
    own = x[:1]
    arguments = {"skip": 0, "add": own}

    def apart() -> Tensor:
        return quantize_rows(dequantize_reduce(sent, format, n, torch.float32, **arguments), to)

    with kernels(scale):
        other = f"{scale.seconds(apart) * 1e6:.0f}"
    call = functools.partial(dequantize_reduce_quantize, sent, format, n, to, **arguments)
    moved = sent[1:].nbytes + own.nbytes + to.payload_bytes(n)
    return row(scale, rate, moved, call, "two kernels, fp32 between", other)

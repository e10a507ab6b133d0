"""Runs the kernels of quantized messages in Triton's interpreter beside their specification and prints what differs as
JSON: a process of its own, since Triton reads TRITON_INTERPRET when a kernel is defined. Started by
tests/unit/kernels/test_quantize_kernels.py with the names of the groups of cases to run."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator

import e4m3
import torch
from torch import Tensor

from rewriter.kernels import Format, dequantize_reduce, dequantize_rows, parse_format, quantize_rows, quantize_triton
from rewriter.kernels.quantize import _parts, _unpack

# the interpreter computes 1 / 0 and inf − inf where kernels choose another value afterwards
warnings.filterwarnings("ignore", category=RuntimeWarning)

FORMATS = ("int8", "int6", "int4", "int2", "fp8", "int4-hadamard", "int3-hadamard", "int2-hadamard")
BLOCKS = ("int8@16", "int6@64", "int2@4096", "fp8@64", "int4-hadamard@16", "int3-hadamard@32", "int2-hadamard@1024")
SPECIAL = 11  # blocks, see `numbers`
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Given = tuple[int | None, float]
SEEDS = {"nearest": None, "dithered": (1 << 40) - 3}


def numbers(rows: int, n: int, block: int, dtype: torch.dtype) -> Tensor:
    """Normal ones; blocks of zeros, of ± the largest number, of denormal ones, of a lone number, of one sign, of
    numbers near the smallest and largest powers of two, with inf, −inf and NaN: the first `SPECIAL` of each row."""
    g = torch.Generator().manual_seed(n)
    x = torch.randn(rows, n, generator=g)
    info = torch.finfo(dtype)
    sign = x.sign()
    kinds = [
        torch.zeros(n),
        sign[-1] * info.max,
        sign[-1] * info.smallest_normal / 64,
        # the interpreter reads denormal bf16 wrongly
        x[-1].clamp(1) * info.smallest_normal if dtype == torch.bfloat16 else x[-1] * info.smallest_normal,
        x[-1] * 2.0**-112,
        x[-1].abs(),
        (torch.arange(n) % block == 5) * info.max,
        x[-1] * info.max / 16,
    ]
    for row in range(rows):
        for i, kind in enumerate(kinds):
            part = slice(i * block, (i + 1) * block)
            x[row, part] = kind[part]
        for i, bad in enumerate((torch.inf, -torch.inf, torch.nan)):
            x[row, (len(kinds) + i) * block + 3 * i :][:1] = bad
    return x.to(dtype)


def sent(payload_RB: Tensor, format: Format, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """(codes [R, K, E], scales [R, K], the rest) as integers."""
    planes, scales, rest = _parts(payload_RB, format, format.blocks(n))
    codes = _unpack([plane.clone() for plane in planes], format)
    return codes.int(), scales.int() & 0xFFFF, rest


def differences(got: Tensor, expected: Tensor, format: Format, n: int) -> dict[str, float]:
    """How many bytes differ; what part of normal numbers has another code; by how much codes and scales differ."""
    codes, scales, rest = sent(got, format, n)
    want_codes, want_scales, _ = sent(expected, format, n)
    off, away = (codes - want_codes).abs(), (scales - want_scales).abs()
    return {
        "bytes": int((got != expected).sum()),
        "codes": (off[:, SPECIAL:] > 0).float().mean().nan_to_num().item(),
        "code step": int(off.max()),
        "scale step": int(away.max()),
        "rest": int(rest.sum()),
    }


def quantized(
    format: Format, dtype: torch.dtype, seed: int | None, rows: int, n: int, order: list[int] | None = None
) -> dict[str, float]:
    x = numbers(rows, n, format.block, dtype)
    expected = quantize_rows(x, format, seed=seed, order=order)
    guarded = torch.full((expected.shape[0], expected.shape[1] + 32), 0xA5, dtype=torch.uint8)
    got = guarded[:, : expected.shape[1]]
    quantize_triton.quantize_rows(x, format, order, seed, got)
    found = differences(got, expected, format, n)
    return found | {"outside": int((guarded[:, expected.shape[1] :] != 0xA5).sum())}


def cut(x: Tensor) -> Tensor:
    """To bf16 as the interpreter does it; a GPU rounds, and the test of compiled code looks for that."""
    return (x.view(torch.int32) & -65536).view(torch.float32).bfloat16()


def same(got: Tensor, expected: Tensor) -> int:
    """How many numbers are not the same bits, apart from NaN, and denormal bf16: the interpreter errs."""
    bits = {2: torch.int16, 4: torch.int32}[got.element_size()]
    excused = got.isnan() & expected.isnan()
    if got.dtype == torch.bfloat16:
        excused |= expected.abs() < torch.finfo(got.dtype).smallest_normal
    return int(((got.view(bits) != expected.view(bits)) & ~excused).sum())


def dequantized(format: Format, dtype: torch.dtype, seed: int | None, rows: int, n: int) -> dict[str, float]:
    """Payloads of fp32 numbers with every exponent; the same bits are expected."""
    x = numbers(rows, n, format.block, torch.float32)
    seeds = [None if seed is None else seed + row for row in range(rows)]
    payload = torch.cat([quantize_rows(x[row : row + 1], format, seed=seeds[row]) for row in range(rows)])
    guarded = torch.full((rows, n + 16), 7.0, dtype=dtype)
    got = guarded[:, :n]
    quantize_triton.dequantize_rows(payload, format, n, seed, got)
    expected = dequantize_rows(payload, format, n, dtype, seed=seed)
    if dtype == torch.bfloat16:
        wide = dequantize_rows(payload, format, n, torch.float32, seed=seed)
        expected = cut(wide.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max))
    return {"numbers": same(got, expected), "outside": int((guarded[:, n:] != 7).sum())}


ONE, LONG = "one number", "a tile that rows fill with a tail after it"


def case(name: str, dtype: str, seed: str, *lengths: str) -> Iterator[tuple[str, dict[str, float]]]:
    format = parse_format(name)
    if format.floating:
        seed = "nearest"
    for length in lengths or (ONE, LONG):
        n = 1 if length == ONE else quantize_triton.tile_of(format).K * format.block + 12 * format.block + 77
        about = f"{name} {dtype} {seed} {n}"
        yield f"{about} quantize", quantized(format, DTYPES[dtype], SEEDS[seed], 1, n)
        yield f"{about} dequantize", dequantized(format, DTYPES[dtype], SEEDS[seed], 1, n)


def some() -> Iterator[tuple[str, dict[str, float]]]:
    for name in FORMATS:
        yield from case(name, "bf16", "nearest")
        yield from case(name, "fp16", "dithered", LONG)
        yield from case(name, "fp32", "nearest", LONG)


def others() -> Iterator[tuple[str, dict[str, float]]]:
    for name in FORMATS:
        yield from case(name, "fp16", "dithered", ONE)
        yield from case(name, "fp32", "nearest", ONE)
        for dtype, seed in (("bf16", "dithered"), ("fp16", "nearest"), ("fp32", "dithered")):
            yield from case(name, dtype, seed)
    for name in BLOCKS:
        for dtype in DTYPES:
            for seed in SEEDS:
                yield from case(name, dtype, seed)


def layouts() -> Iterator[tuple[str, dict[str, float]]]:
    """Rows in another order, more than one tile of each, strides, the ends of blocks and rows."""
    for name in ("int8", "int4-hadamard@16"):
        format = parse_format(name)
        for n in (format.block - 1, 3 * format.block, 40 * format.block + 1):
            for order in ([2, 0, 1], [1, 1]):
                about = f"{name} {n} order {order}"
                yield about, quantized(format, torch.float16, 7, 3, n, order=order)


def ties() -> Iterator[tuple[str, dict[str, float]]]:
    """Numbers of E4M3, the middles between them and what is beside these."""
    format, x = parse_format("fp8"), e4m3.around_ties().view(1, -1)
    n, payload = x.numel(), quantize_rows(x, format)
    got, read = torch.empty_like(payload), torch.empty_like(x)
    quantize_triton.quantize_rows(x, format, None, None, got)
    yield "quantize", differences(got, payload, format, n)
    quantize_triton.dequantize_rows(payload, format, n, None, read)
    yield "dequantize", {"numbers": same(read, dequantize_rows(payload, format, n, x.dtype))}


def reduced(
    format: Format, to: Format, dtype: torch.dtype, senders: int, seeds: tuple[int | None, int | None], given: Given
) -> dict[str, float]:
    """The sum in `dtype`, and requantized in another order; given: the sender that is skipped, the factor."""
    seed, to_seed = seeds
    skip, factor = given
    n = 21 * format.block + 5
    torch.manual_seed(senders)
    # blocks of numbers that are not finite make one row
    x = torch.stack([numbers(2, n, format.block, torch.bfloat16) for _ in range(senders)]).float()
    x[:, 0, : SPECIAL * format.block] = torch.randn(senders, SPECIAL * format.block)
    # senders differ, and the sum of their largest numbers is finite: one of rotated infinities depends on the order
    x *= torch.rand(senders, 1, 1) / 4
    own = None if skip is None else x[skip].half()
    payload = torch.stack(
        [quantize_rows(x[p], format, seed=None if seed is None else seed + p) for p in range(senders)]
    )
    exact = dequantize_reduce(payload, format, n, torch.float32, seed=seed, skip=skip, add=own, factor=factor)
    expected = cut(exact) if dtype == torch.bfloat16 else exact.to(dtype)
    if skip is not None:
        payload[skip] = 0xFF  # scales of NaN: it must not be read
    got = torch.empty_like(expected)
    quantize_triton.dequantize_reduce(payload, format, n, seed, skip, own, factor, got)
    again = quantize_rows(exact, to, seed=to_seed, order=[1, 0, 1])
    sent_on = torch.full_like(again, 0xA5)
    quantize_triton.dequantize_reduce(
        payload, format, n, seed, skip, own, factor, sent_on, to=to, to_seed=to_seed, order=[1, 0, 1]
    )
    finite = expected[0].double()
    return differences(sent_on, again, to, n) | {
        "numbers": same(got, expected),
        "error": ((got[0].double() - finite).norm() / finite.norm()).item(),
        "NaN": int((got.isnan() != expected.isnan()).sum()),
    }


def sums() -> Iterator[tuple[str, dict[str, float]]]:
    cases = (
        ("int8", "int4", "bf16", 3, (None, None), (None, 1.0)),
        ("int8", "int4-hadamard", "fp16", 3, (5, None), (0, 1 / 3)),
        ("int6", "int8", "fp32", 1, (None, 4), (None, 0.5)),
        ("int4", "int2", "fp32", 4, (-7, (1 << 31) - 1), (3, 1 / 4)),
        ("fp8", "int4", "bf16", 3, (None, 4), (1, 0.5)),
        ("int8", "fp8", "fp32", 2, (6, None), (None, 1.0)),
        ("int2", "int6", "fp16", 3, (None, None), (1, 2.0)),
        ("int4-hadamard", "int4-hadamard", "fp32", 3, (None, None), (1, 1 / 3)),
        ("int3-hadamard@32", "int2@32", "bf16", 2, (9, 9), (None, 1.0)),
        ("int2-hadamard@16", "int3-hadamard@16", "fp16", 3, (2, None), (2, 0.1)),
    )
    for name, to, dtype, senders, seeds, given in cases:
        found = reduced(parse_format(name), parse_format(to), DTYPES[dtype], senders, seeds, given)
        yield f"{name} {to}", found


GROUPS = {"some": some, "others": others, "layouts": layouts, "ties": ties, "sums": sums}


def main() -> None:
    print(json.dumps({name: dict(GROUPS[name]()) for name in sys.argv[1:]}))


if __name__ == "__main__":
    main()

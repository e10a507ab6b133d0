"""Payloads of a few bits per element: their errors, their bytes, and what never may happen to numbers on the way."""

from __future__ import annotations

import e4m3
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.collectives.formats import (
    correlated,
    error,
    mean_in_two_hops,
    mean_over_ranks,
    normal,
    outliers,
    student,
    there_and_back,
)
from benchmarks.gpu.quantize import seeds
from rewriter.kernels import (
    Format,
    dequantize,
    dequantize_reduce,
    dequantize_reduce_quantize,
    dequantize_rows,
    parse_format,
    parse_formats,
    quantize,
    quantize_rows,
)
from rewriter.kernels.blocks import hadamard

FORMATS = ["int8", "int6", "int4", "int2", "fp8", "int4-hadamard", "int3-hadamard", "int2-hadamard"]
DITHERED = [format for format in FORMATS if format != "fp8"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


LIMITS = {  # relative L2 error on normal, Student-t(4) and outlier data
    "int8": (0.0066, 0.011, 0.0205),
    "fp8": (0.0260, 0.0245, 0.0170),
    "int4-hadamard": (0.102, 0.100, 0.077),
    "int3-hadamard": (0.186, 0.184, 0.179),
    "int2-hadamard": (0.345, 0.345, 0.355),
}


@pytest.mark.parametrize("format", LIMITS)
def test_errors_are_within_the_limits_of_their_format(format: str) -> None:
    # int8's error on outliers is that of its blocks with one: 0.0201 to 0.0214 in sixteen draws of columns, by how many
    # share a block, as it is with exact scales, which the next test compares.
    data = (normal(128, 4096), student(128, 4096), outliers(128))
    for x, limit in zip(data, LIMITS[format], strict=True):
        assert limit / 1.3 < error(there_and_back(x, format), x) <= limit


@pytest.mark.parametrize(("format", "levels"), [("int8", 127), ("int6", 31), ("int4", 7)])
def test_symmetric_formats_are_as_good_as_with_exact_scales(format: str, levels: int) -> None:
    for seed in range(3):
        x = outliers(64, seed)
        scale = x.view(-1, 128).abs().amax(1, keepdim=True).double() / levels
        exact = ((x.view(-1, 128) / scale).round() * scale).view_as(x)
        assert error(there_and_back(x, format), x) < 1.005 * error(exact, x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", [*FORMATS, "int4@16", "int3-hadamard@32", "int6@64", "int2-hadamard@1024", "fp8@32"])
def test_any_shape_and_length_comes_back(format: str, dtype: torch.dtype) -> None:
    block = parse_format(format).block
    for shape in [(0,), (1,), (3, 0, 2), (5, 7), (block,), (block + 1,), (2, 3 * block - 1), ()]:
        x = normal(*shape, seed=1).to(dtype)
        for seed in seeds(format, 3):
            payload = quantize(x, format, seed=seed)
            assert payload.dtype == torch.uint8
            assert payload.shape == (parse_format(format).payload_bytes(x.numel()),)
            y = dequantize(payload, format, shape, dtype, seed=seed)
            assert y.shape == x.shape
            assert y.dtype == dtype
            if x.numel() > 1:
                limits = {8: 0.02, 6: 0.06, 4: 0.3, 3: 0.5, 2: 1.0}
                assert error(y, x) < (0.05 if parse_format(format).floating else limits[parse_format(format).bits])


@pytest.mark.parametrize("format", FORMATS)
def test_a_payload_has_the_bits_of_its_name_and_scales_of_16(format: str) -> None:
    f = parse_format(format)
    assert f.payload_bytes(128 * 1000) == 1000 * (128 * f.bits // 8 + 2)
    assert f.payload_bytes(128 * 1000 + 1) == -(-1001 * (128 * f.bits // 8 + 2) // 16) * 16
    assert quantize(torch.ones(129), format).numel() == -(-2 * (128 * f.bits // 8 + 2) // 16) * 16
    assert str(parse_format(f"{format}@64")) == f"{format}@64"
    assert str(parse_format(f"{format}@128")) == format


@pytest.mark.parametrize("format", FORMATS)
def test_a_part_of_a_tensor_does_not_change_another_block(format: str) -> None:
    x = normal(10 * 128)
    y = x.clone()
    y[3 * 128 : 4 * 128] *= 1000
    same = torch.ones(10, dtype=torch.bool)
    same[3] = False
    for seed in seeds(format, 9):
        a, b = there_and_back(x, format, seed).view(10, 128), there_and_back(y, format, seed).view(10, 128)
        assert torch.equal(a[same], b[same])
        assert not torch.equal(a[3], b[3])


@pytest.mark.parametrize("format", FORMATS)
def test_regular_blocks_are_no_worse_than_random_ones(format: str) -> None:
    """Equal numbers and waves, of which a Hadamard matrix by itself makes one number beside zeros."""
    n = torch.arange(1024)
    waves = [torch.ones(1024), 1.0 - 2.0 * (n % 2), 1.0 - 2.0 * (n // 32 % 2), 1 + 0.01 * normal(1024)]
    worst = max(error(there_and_back(x, format), x) for x in waves)
    assert worst < 1.1 * error(there_and_back(normal(1024), format), normal(1024))


@pytest.mark.parametrize("format", ["int8", "int6", "int4", "fp8"])
def test_zero_stays_zero_and_the_extremes_do_not_saturate(format: str) -> None:
    x = normal(4 * 128)
    x[::3] = 0
    x[5], x[6] = 10.0, -10.0
    y = there_and_back(x, format)
    assert (y[::3][x[::3] == 0] == 0).all()
    # the scale is rounded up to 8 bits of mantissa
    assert 10 <= y[5] <= 10.05
    assert y[6] == -y[5]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_extreme_values(format: str, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    signs = normal(256, seed=2).sign().double()
    top = (signs * info.max).to(dtype)
    lone = torch.zeros(256, dtype=dtype)
    lone[7], lone[200] = info.max, -info.max
    for seed in seeds(format, 1):
        for x in (top, lone, top.abs()):
            y = there_and_back(x, format, seed)
            assert y.isfinite().all()
            # a lone value among zeros is what uniform dithered levels are worst at: √(128 / 12) / 1.5 for four of them
            assert error(y / 256, x / 256) < (1 if seed is None else 2.2)
        assert (there_and_back(torch.zeros(300, dtype=dtype), format, seed) == 0).all()
        tiny = (signs * info.smallest_normal / 64).to(dtype)  # denormal
        assert (there_and_back(tiny, format, seed).double() - tiny.double()).abs().max() <= max(
            info.smallest_normal, 2.0**-118
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_not_a_number_never_becomes_one(format: str, bad: float, dtype: torch.dtype) -> None:
    x = normal(3 * 128).to(dtype)
    x[130] = bad
    for seed in seeds(format, 1):
        y = there_and_back(x, format, seed)
        assert y[128:256].isnan().all()
        assert y[:128].isfinite().all()
        assert y[256:].isfinite().all()
        payloads = torch.stack([quantize(normal(3 * 128).to(dtype), format, seed=seed), quantize(x, format, seed=seed)])
        total = dequantize_reduce(payloads[:, None], format, 384, dtype, seed=seed)[0]
        assert total[128:256].isnan().all()
        assert total[:128].isfinite().all()
        assert total[256:].isfinite().all()


def test_scale_of_numbers_does_not_matter() -> None:
    x = normal(64 * 128)
    for format in FORMATS:
        errors = [error(there_and_back(x * 2.0**e, format), x * 2.0**e) for e in (-100, -30, 0, 30, 100)]
        assert max(errors) <= 1.01 * min(errors)


@pytest.mark.parametrize("format", DITHERED)
def test_dither_has_no_bias_and_its_seeds_are_independent(format: str) -> None:
    x = student(8 * 128)
    errors = torch.stack([there_and_back(x, format, seed) - x for seed in range(400)])
    # nothing but the mean of 400 errors is left
    assert errors.mean(0).square().mean() < 1.4 * errors.square().mean() / 400
    assert not torch.equal(errors[0], errors[1])
    neighbours = (errors[:-1] * errors[1:]).mean() / errors.square().mean()
    assert abs(neighbours) < 0.02


def test_dithered_gradients_of_correlated_ranks_average_out() -> None:
    """64 ranks whose gradients share 0.9 of their variance; without dither their errors are alike, and stay."""
    x = correlated(64, 256 * 128, 0.9)
    for format in ("int2", "int2-hadamard"):
        assert error(mean_over_ranks(x, format, dither=True), x.mean(0)) <= 0.12
        assert error(mean_over_ranks(x, format, dither=False), x.mean(0)) > 0.15


@pytest.mark.parametrize("format", FORMATS)
def test_sums_are_those_of_what_was_sent(format: str) -> None:
    x = student(4, 3, 700)  # senders, rows, elements
    own = normal(3, 700, seed=5)
    for seed in seeds(format, 40):
        sent = torch.stack([quantize_rows(x[p], format, seed=None if seed is None else seed + p) for p in range(4)])
        by_sender = [None if seed is None else seed + p for p in range(4)]
        received = torch.stack(
            [
                torch.stack([dequantize(row, format, (700,), torch.float32, seed=s) for row in rows])
                for rows, s in zip(sent, by_sender, strict=True)
            ]
        ).double()
        got = dequantize_reduce(sent, format, 700, torch.float32, seed=seed)
        assert error(got, received.sum(0)) < 1e-6
        got = dequantize_reduce(sent, format, 700, torch.float32, seed=seed, skip=2, add=own, factor=0.25)
        want = (received.sum(0) - received[2] + own.double()) / 4
        assert error(got, want) < 1e-6
        again = dequantize_reduce_quantize(
            sent, format, 700, "int8@64", seed=seed, skip=2, add=own, factor=0.25, to_seed=7, order=[2, 0, 1]
        )
        assert torch.equal(again, quantize_rows(got[[2, 0, 1]], "int8@64", seed=7))


def test_rows_are_reordered_and_strided_rows_read_in_place() -> None:
    x = normal(6, 300)
    got = quantize_rows(x, "int4", order=[0, 2, 4, 1, 3, 5])
    assert torch.equal(got, torch.stack([quantize(x[r], "int4") for r in (0, 2, 4, 1, 3, 5)]))
    assert torch.equal(quantize_rows(x[:, 50:250], "int6"), quantize_rows(x[:, 50:250].clone(), "int6"))
    out = torch.empty(6, 3 * 66 + 10 + 6, dtype=torch.uint8)[:, :208]
    assert torch.equal(quantize_rows(x, "int4", out=out), quantize_rows(x, "int4"))
    y = torch.empty(6, 400)[:, :300]
    dequantize_rows(out, "int4", 300, torch.float32, out=y)
    assert torch.equal(y, dequantize_rows(out, "int4", 300, torch.float32))


def test_long_rows_are_cut_into_pieces_that_agree() -> None:
    x = normal(1, 5 * (1 << 17) + 77)
    for seed in (None, 3):
        whole = quantize(x, "int4", seed=seed)
        y = dequantize(whole, "int4", x.shape, x.dtype, seed=seed)
        # the dither goes on from piece to piece, and tails are those of short tensors
        part = slice(4 * (1 << 17), None)
        if seed is None:
            assert torch.equal(y[0, part], there_and_back(x[0, part], "int4"))
        assert error(y, x) < 0.13
        total = dequantize_reduce(whole[None, None], "int4", x.shape[1], x.dtype, seed=seed)
        assert torch.equal(total, y)


def test_two_hops_over_8_nodes_of_8_with_rotation() -> None:
    """int8 inside the node, int4 rotated between nodes, on heavy tails: the mean over 64 ranks' gradients."""
    x = correlated(64, 64 * 128, 0.9, heavy=True).view(8, 8, -1)
    dithered, nearest = (
        error(mean_in_two_hops(x, "int8/int4-hadamard", dither=d), x.mean((0, 1))) for d in (True, False)
    )
    assert 0.02 < dithered <= 0.045
    # what nodes have in common is rounded alike without dither, and its error does not average out
    assert nearest > 1.1 * dithered


def test_what_is_kept_between_calls_serves_all_of_them() -> None:
    """Matrices and levels that were first made for fake tensors, or in inference mode."""
    x = normal(1024)
    for format in ("int4-hadamard@512", "int2-hadamard@256"):  # which no other test has
        with FakeTensorMode():
            parse = parse_format(format)
            assert type(hadamard(parse.block, x.device)) is not torch.Tensor
        with torch.inference_mode():
            first = there_and_back(x, format)
        weight = x.clone().requires_grad_()
        assert torch.equal(there_and_back(weight, format), first)
        assert not there_and_back(weight, format).requires_grad
        assert not hadamard(parse.block, x.device).is_inference()


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: parse_format("int5"), "int5.*expected one of int8, int6"),
        (lambda: parse_format("int8-hadamard"), "int8-hadamard"),
        (lambda: parse_format("int4@100"), "100.*power of two"),
        (lambda: parse_format("int4@8"), "block 8"),
        (lambda: parse_format("int4@"), "int4@"),
        (lambda: parse_format("int4@-128"), "@-128"),
        (lambda: parse_format("int2-hadamard@2048"), "2048.*1024"),
        (lambda: Format(7), "int7"),
        (lambda: parse_formats("int8/int3"), "int3"),
        (lambda: parse_format("fp8-hadamard"), "fp8-hadamard"),
        (lambda: parse_format("fp6"), "fp6"),
        (lambda: quantize(torch.ones(3, dtype=torch.float64), "int8"), "float64"),
        (lambda: quantize(torch.ones(3, dtype=torch.int32), "int8"), "int32"),
        (lambda: dequantize(torch.zeros(144, dtype=torch.uint8), "int8", (129,), torch.float32), "272 bytes for 129"),
        (lambda: dequantize(torch.zeros(144), "int8", (128,), torch.float32), "float32"),
        (lambda: dequantize(torch.zeros(144, dtype=torch.uint8), "int8", (128,), torch.float64), "dtype torch.float64"),
    ],
)
def test_what_cannot_be_is_refused_by_name(call, named: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=named):
        call()


SENT = torch.zeros(2, 1, 144, dtype=torch.uint8)


@pytest.mark.parametrize(
    "call",
    [
        lambda: parse_formats("int8/fp8", dithered=True),
        lambda: quantize(torch.ones(128), "fp8", seed=0),
        lambda: dequantize(SENT[0, 0], "fp8", (128,), torch.float32, seed=0),
        lambda: dequantize_reduce(SENT, "fp8", 128, torch.float32, seed=0),
        lambda: dequantize_reduce_quantize(SENT, "fp8", 128, "int8", seed=0),
        lambda: dequantize_reduce_quantize(SENT, "int8", 128, "fp8", to_seed=0),
    ],
)
def test_levels_that_are_not_uniform_are_not_dithered(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=r"format 'fp8': its levels are not uniform.* Give int8"):
        call()


def test_fp8_is_the_nearest_number_of_e4m3() -> None:
    """Every number, every tie and what is beside it; zeros keep their signs."""
    x = e4m3.around_ties()
    for scale in (1.0, 2.0**-100, 2.0**110):
        payload = quantize(x * scale, "fp8")
        codes = payload[: x.numel()].view(x.shape)
        assert torch.equal(codes, e4m3.nearest(x))
        assert set(range(256)) - set(codes.flatten().tolist()) == {0x7F, 0xFF}  # NaN
        y = dequantize(payload, "fp8", x.shape, torch.float32)
        assert torch.equal(y.double().abs() / scale, e4m3.numbers()[codes.int() & 0x7F])
        assert torch.equal(y.signbit(), x.signbit())


@pytest.mark.parametrize("block", [16, 128, 1024])
def test_fp8_is_torchs_float8_on_a_scale_for_each_block(block: int) -> None:
    for make in (normal, student, lambda *shape: outliers(shape[0])):
        x = make(64, 4096)
        x_KE = x.double().view(-1, block)
        mantissa, exponent = torch.frexp(x_KE.abs().amax(1, keepdim=True) / 448)
        scale = torch.ldexp((mantissa * 512).ceil() / 512, exponent)  # 9 bits, rounded up
        expected = ((x_KE / scale).float().to(torch.float8_e4m3fn).double() * scale).view_as(x)
        found = there_and_back(x, f"fp8@{block}")
        assert (found != expected).double().mean() < 1e-4  # quotients beside a tie
        assert ((found - x).abs() <= x.abs() / 16 + scale.max() * 2.0**-10).all()


def test_hops() -> None:
    assert parse_formats("int8/int4-hadamard@64") == (Format(8), Format(4, True, 64))
    assert parse_formats("fp8@64/int4") == (Format(8, block=64, floating=True), Format(4))
    assert parse_formats("int6") == (Format(6), Format(6))
    assert parse_formats(Format(6)) == (Format(6), Format(6))

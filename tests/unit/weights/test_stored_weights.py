"""FP8 and MXFP4 weights that a rank keeps as they are stored: the same values, in half of bf16's bytes or less."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import quantized_checkpoints
import torch
import zoo
from quantized_checkpoints import fp8_blocks
from quantized_shards import sharded, write

from rewriter.kernels import stored_weights
from rewriter.runtime import load
from rewriter.weights.expressions import (
    Concat,
    Dequantized,
    Expression,
    Slice,
    Stack,
    Tensor,
    Transpose,
    is_dequantized,
)
from rewriter.weights.references import RankWeights
from rewriter.weights.stored_weight import Stored, StoredWeight, stored

SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("fp8-experts", "fp8-tensor")]
KEPT = ["fp8-blocks", "fp8-channel", "mxfp4", *SLOW]


def nbytes(weight: StoredWeight) -> int:
    return sum(part.untyped_storage().nbytes() for part in weight.stored.parts)


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.fast("mxfp4")
def test_ranks_hold_half_the_bytes_and_compute_with_the_same_values(tmp_path: Path, kind: str) -> None:
    """At tp 2 a rank's 56 channels of an MLP, and its heads of 8, cut blocks of 16."""
    source = tmp_path / "source"
    quantized_checkpoints.make(kind, source, "bfloat16")
    out = write(source, tmp_path / "out")
    program = sharded(source)
    for rank in range(2):
        weights = RankWeights.open(out, out / "runtime/tp2/weights.json", rank)
        names = dict.fromkeys(weights.parameters)
        kept, plain = weights.read(names, "cpu", keep_quantized=True), weights.read(names, "cpu")
        # with a scale for every row of 32 columns they would not be small enough
        wide = 40 if kind == "fp8-channel" else 0
        quantized = [n for n, e in weights.parameters.items() if is_dequantized(e) and weights.shape(n)[-1] >= wide]
        assert {name for name, tensor in kept.items() if isinstance(tensor, StoredWeight)} == set(quantized)
        assert len(quantized) >= 8
        assert len(program.parameters) > len(quantized)
        for name in quantized:
            weight = kept[name]
            assert isinstance(weight, StoredWeight)
            assert (weight.shape, weight.dtype) == (plain[name].shape, torch.bfloat16)
            torch.testing.assert_close(weight.values(), plain[name], rtol=0, atol=0, msg=name)
            assert nbytes(weight) <= 0.55 * 2 * weight.numel(), name


@pytest.mark.parametrize("kind", ["fp8-experts", "mxfp4"])
@torch.no_grad()
@pytest.mark.fast("mxfp4")
def test_a_loaded_module_keeps_them_and_computes_the_same(tmp_path: Path, kind: str) -> None:
    quantized_checkpoints.make(kind, tmp_path / "source", "bfloat16")
    out = write(tmp_path / "source", tmp_path / "out", tp=1)
    kept, plain = load(out, device="cpu"), load(out, device="cpu", keep_quantized=False)
    held = [p for p in kept.parameters() if isinstance(p, StoredWeight)]
    assert len(held) >= 8
    assert not any(p.requires_grad for p in held)
    assert not any(isinstance(p, StoredWeight) for p in plain.parameters())
    ids = zoo.batch()
    torch.testing.assert_close(kept(ids), plain(ids), rtol=0, atol=0)
    wide = load(out, device="cpu", dtype=torch.float32)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}
    torch.testing.assert_close(wide(ids), load(out, dtype=torch.float32, keep_quantized=False)(ids), rtol=0, atol=0)


def test_gradients_go_through_what_is_kept(tmp_path: Path) -> None:
    """To the input: the weights themselves are not trained."""
    weight = example()
    x = torch.randn(3, weight.shape[1], requires_grad=True)
    torch.nn.functional.linear(x, torch.nn.Parameter(weight, requires_grad=False)).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, weight.values().sum(0).expand(3, -1))


def example() -> StoredWeight:
    codes = torch.randn(32, 48).to(torch.float8_e4m3fn)
    return StoredWeight(Stored("fp8", (codes, torch.rand(2, 3)), (16, 16)), torch.float32)


def test_what_keeps_it_and_what_does_not() -> None:
    weight = example()
    for same in (weight.detach(), weight.to(torch.bfloat16), weight.to("cpu", torch.float16), copy.copy(weight)):
        assert isinstance(same, StoredWeight)
    assert weight.to(torch.bfloat16).values().equal(weight.values().to(torch.bfloat16))
    for other in (weight + 0, weight.T, weight[:3], weight.clone()):
        assert type(other) is torch.Tensor
    assert (weight + 0).equal(weight.values())


SHAPES = {"a": (32, 48), "s": (2, 3), "b": (48, 48), "t": (3, 3), "one": (1,)}
A = Dequantized("fp8", (Tensor("a"), Tensor("s")), (16, 16), "BF16")
B = Dequantized("fp8", (Tensor("b"), Tensor("t")), (16, 16), "BF16")
WHOLE = Dequantized("fp8", (Tensor("a"), Tensor("one")), (48,), "BF16")


@pytest.mark.parametrize(
    "expression",
    [
        A,
        Slice(A, 0, ((4, 20),)),
        Slice(A, 1, ((40, 48), (0, 24))),
        Slice(Slice(A, 0, ((0, 24),)), 0, ((8, 24),)),
        Transpose(Slice(A, 0, ((8, 32),)), 0, 1),
        Concat((A, B), 0),
        Concat((Slice(A, 0, ((0, 24),)), Slice(B, 0, ((8, 48),))), 0),
        Concat((WHOLE, A, WHOLE), 0),
        Concat((WHOLE, WHOLE), 1),
        Stack((A, A), 0),
        Slice(Stack((A, WHOLE), 0), 1, ((8, 32),)),
        Concat((Stack((A, A), 0), Stack((WHOLE, A), 0)), 1),
    ],
    ids=str,
)
def test_rearrangements_of_blocks(expression: Expression) -> None:
    """Against the same rearrangement of what each block stands for."""
    from rewriter.weights.expressions import evaluate

    draw = torch.Generator().manual_seed(0)
    tensors = {n: torch.rand(shape, generator=draw) + 0.5 for n, shape in SHAPES.items()}
    tensors |= {n: tensors[n].to(torch.float8_e4m3fn) for n in "ab"}
    found = stored(expression, tensors.__getitem__)
    assert found is not None
    torch.testing.assert_close(found.values(torch.float32), evaluate(expression, tensors.__getitem__), rtol=0, atol=0)
    assert found.shape == tuple(expression.shape(SHAPES))
    if len(found.shape) == 3:  # one expert
        one = StoredWeight(found, torch.float32)[1]
        assert isinstance(one, StoredWeight)
        torch.testing.assert_close(one.values(), found.values(torch.float32)[1], rtol=0, atol=0)


def test_blocks_cut_so_small_that_scales_outweigh_codes_are_dequantized() -> None:
    tensors = {"a": torch.ones(32, 48).to(torch.float8_e4m3fn), "s": torch.ones(2, 3)}
    assert stored(Slice(Slice(A, 0, ((1, 32),)), 1, ((1, 48),)), tensors.__getitem__) is None


def test_mxfp4_keeps_whole_groups_only() -> None:
    blocks = torch.randint(256, (2, 6, 3, 16), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    tensors = {"blocks": blocks, "scales": torch.full((2, 6, 3), 127, dtype=torch.uint8)}
    whole = Transpose(Dequantized("mxfp4", (Tensor("blocks"), Tensor("scales")), (), "BF16"), 1, 2)
    values = stored_weights.mxfp4(tensors["blocks"], tensors["scales"]).transpose(1, 2)
    for dim, start, stop in ((1, 32, 96), (2, 1, 3), (0, 1, 2)):
        found = stored(Slice(whole, dim, ((start, stop),)), tensors.__getitem__)
        assert found is not None
        assert found.values(torch.float32).equal(values.narrow(dim, start, stop - start))
    assert stored(Slice(whole, 1, ((16, 96),)), tensors.__getitem__) is None


def test_cuts_of_large_blocks_cost_little() -> None:
    """Qwen3's and DeepSeek-V3's blocks of 128 × 128, cut at 64."""
    shapes = {"a": (512, 512), "s": (4, 4)}
    tensors = {"a": torch.ones(512, 512).to(torch.float8_e4m3fn), "s": torch.ones(4, 4)}
    node = Dequantized("fp8", (Tensor("a"), Tensor("s")), (128, 128), "BF16")
    found = stored(Slice(node, 0, ((192, 320),)), tensors.__getitem__)
    assert found is not None
    assert found.nbytes <= 0.51 * 2 * 128 * 512
    assert node.shape(shapes) == (512, 512)
    assert fp8_blocks(128, 128)[1]["weight_block_size"] == [128, 128]

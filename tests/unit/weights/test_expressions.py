"""What an expression over checkpoint tensors says about itself: names, shapes, and what it refuses."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from rewriter.common.errors import RewriterError
from rewriter.weights.expressions import Concat, Expression, Slice, Stack, Tensor, Transpose

SHAPES = {"q": (8, 4), "k": (2, 4), "v": (2, 4), "bias": (8,), "scalar": ()}


@pytest.mark.parametrize(
    ("expression", "shape"),
    [
        (Tensor("q"), (8, 4)),
        (Slice(Tensor("q"), 0, ((2, 4),)), (2, 4)),
        (Slice(Tensor("q"), 1, ((0, 1), (3, 4))), (8, 2)),
        (Slice(Tensor("k"), 0, ((0, 2), (0, 2), (1, 2))), (5, 4)),  # repeated and overlapping: replicated heads
        (Concat((Tensor("q"), Tensor("k"), Tensor("v")), 0), (12, 4)),
        (Stack((Tensor("k"), Tensor("v")), 2), (2, 4, 2)),
        (Transpose(Tensor("q"), 0, 1), (4, 8)),
        (Slice(Transpose(Concat((Tensor("k"), Tensor("v")), 0), 0, 1), 1, ((1, 3),)), (4, 2)),
    ],
    ids=str,
)
def test_shape(expression: Expression, shape: tuple[int, ...]) -> None:
    assert expression.shape(SHAPES) == shape


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        (Tensor("nope"), "nope: the checkpoint has no tensor"),
        (Slice(Tensor("q"), 0, ((4, 9),)), "q[4:9]: range [4, 9) does not lie in dimension 0, which has size 8"),
        (Slice(Tensor("q"), 0, ((3, 3),)), "range [3, 3)"),
        (Slice(Tensor("q"), 0, ((-1, 3),)), "range [-1, 3)"),
        (Slice(Tensor("q"), 2, ((0, 1),)), "dimension 2 does not exist in shape [8, 4]"),
        (Slice(Tensor("scalar"), 0, ((0, 1),)), "dimension 0 does not exist in shape []"),
        (Transpose(Tensor("q"), 0, -1), "dimension -1 does not exist in shape [8, 4]"),
        (Concat((Tensor("q"), Tensor("k")), 1), "cat of q [8, 4] and k [2, 4]: all sizes but dimension 1's"),
        (Concat((Tensor("q"), Tensor("bias")), 0), "cat of q [8, 4] and bias [8]"),
        (Stack((Tensor("q"), Tensor("k")), 0), "stack of q [8, 4] and k [2, 4]"),
    ],
)
def test_misfits_are_refused_by_name(expression: Expression, message: str) -> None:
    with pytest.raises(RewriterError, match=re.escape(message)):
        expression.shape(SHAPES)


def test_tensors_are_named_in_reading_order() -> None:
    qkv = Concat((Slice(Tensor("q"), 0, ((0, 4),)), Tensor("k"), Stack((Tensor("v"), Tensor("k")), 0)), 0)
    assert list(qkv.tensors()) == ["q", "k", "v", "k"]


def test_equal_expressions_are_one_key() -> None:
    assert (
        len({Slice(Tensor("q"), 0, ((0, 4),)), Slice(Tensor("q"), 0, ((0, 4),)), Slice(Tensor("q"), 0, ((4, 8),))}) == 2
    )


def test_reads_as_text() -> None:
    expression = Concat((Slice(Tensor("q"), 1, ((0, 2), (3, 4))), Transpose(Tensor("k"), 0, 1)), 0)
    assert str(expression) == "cat(q[:, 0:2 + 3:4], transpose(k, 0, 1), dim=0)"


def test_needs_neither_torch_nor_numpy() -> None:
    code = "import rewriter.weights.expressions, sys; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

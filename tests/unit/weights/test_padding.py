"""Padding of quantized weights in their form: what the padded parts stand for, against the weights before packing."""

from __future__ import annotations

from pathlib import Path

import pytest
import quantized_checkpoints
import torch

from rewriter.common.text_settings import quantization_settings
from rewriter.tracing.meta_model import load_config
from rewriter.weights import Checkpoint
from rewriter.weights.expressions import Tensor, evaluate, is_dequantized
from rewriter.weights.padding import PaddedCheckpoint, PaddedTensors
from rewriter.weights.quantized_tensors import quantized_weights

KEPT = ("fp8-blocks", "fp8-experts", "fp8-tensor", "autofp8", "fp8-channel", "mxfp4", "awq", "gptq", "gptq-act-order",
        "gptq-v2")  # fmt: skip
WHOLE = ("bnb-nf4", "bnb-int8", "fp8-exponents")


def padded(index: list[int], size: int) -> torch.Tensor:
    """[..., size] after padding: the elements at these places, 0 at -1."""
    picked = torch.zeros(len(index), size)
    for row, place in enumerate(index):
        if place >= 0:
            picked[row, place] = 1.0
    return picked


@pytest.mark.parametrize("kind", [*KEPT, *WHOLE])
def test_padded_parts_stand_for_the_padded_weight(kind: str, tmp_path: Path) -> None:
    meant = quantized_checkpoints.make(kind, tmp_path)
    checkpoint, config = Checkpoint.open(tmp_path), load_config(tmp_path).to_dict()
    assert quantization_settings(config)
    quantized = quantized_weights(checkpoint, config)
    assert quantized is not None
    stands = {expression: name for name, expression in quantized.tensors.items() if expression != Tensor(name)}
    for name in [name for name in stands.values() if ".0." in name and "proj" in name][:7]:
        expression = quantized.tensors[name]
        rows, columns = expression.shape(checkpoint.shapes)[-2:]
        group, last = 32, len(expression.shape(checkpoint.shapes)) - 1
        cut = group if rows > group else 0
        # groups of rows exchanged, with padding between them; columns with padding behind them
        index = {
            last - 1: [*range(cut, rows), *[-1] * group, *range(cut)],
            last: [*range(columns), *[-1] * 2 * group],
        }
        if kind == "fp8-exponents":  # blocks of 24 rows
            index[0] = [*range(rows), *[-1] * 8, 0, rows - 2]
        made = PaddedTensors(checkpoint, stands)
        made.pad(expression, {dim: tuple(places) for dim, places in index.items()})
        first, second = (padded(places, size) for places, size in zip(index.values(), (rows, columns), strict=True))
        expected = first @ meant[name].float() @ second.T
        assert any(is_dequantized(change) for change in made.changes.values()) == (kind in WHOLE)
        after = PaddedCheckpoint(checkpoint, made.changes)
        if kind in WHOLE:
            actual = checkpoint.evaluate(made.changes[name])
        else:
            again = quantized_weights(after, config)
            assert again is not None
            actual = evaluate(again.tensors[name], after.read)
        assert torch.equal(actual.float(), expected), name

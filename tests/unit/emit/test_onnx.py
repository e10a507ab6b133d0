"""ONNX export: equal to the ladder under onnxruntime, whole or absent, and clear where it cannot be done."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import emitted
import numpy as np
import onnx
import onnxruntime
import oracles
import pytest
import quantized_checkpoints
import torch
import zoo
from onnx import TensorProto, helper

from rewriter.cli import main
from rewriter.common.errors import RewriterError, VerificationError
from rewriter.common.run_context import RunContext
from rewriter.emit import onnx as emit_onnx
from rewriter.emit.onnx import export_onnx

SLOW = ("gpt2", "gemma2", "gemma3_text", "mixtral", "qwen3_moe", "gpt_neox", "olmo2")
FAMILIES = ["llama", *(pytest.param(family, marks=pytest.mark.slow) for family in SLOW)]


def export(family: str, selection: str, file: Path) -> None:
    export_onnx(emitted.emitted(family, selection), file, RunContext(trust_remote_code=True))


def run(file: Path, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    inputs = {"input_ids": ids.numpy(), "position_ids": np.ascontiguousarray(positions.numpy())}
    return torch.from_numpy(session.run(None, inputs)[0])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_it_computes_the_ladder(family: str, tmp_path: Path) -> None:
    """At batches and lengths that were not traced, beyond every window, and at positions that do not start at 0."""
    file = tmp_path / "model.onnx"
    export(family, "upper-half", file)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    sizes = ["batch", "length"]
    assert {i.name: i.shape for i in session.get_inputs()} == {"input_ids": sizes, "position_ids": sizes}
    assert {o.name: o.shape for o in session.get_outputs()} == {"logits": [*sizes, 256]}
    original, layers = zoo.shared(family), emitted.layers(family, "upper-half")
    for batch, length, first in ((2, 21, 0), (1, 1, 0), (3, 100, 0), (2, 40, 7)):
        ids = zoo.batch(batch, length)
        positions = torch.arange(first, first + length).expand(batch, length)
        mask = torch.ones_like(ids)
        expected = oracles.ladder_logits(original, layers, ids, positions, mask)
        assert oracles.relative_error(run(file, ids, positions), expected) <= 1e-5, (batch, length, first)


@pytest.mark.slow
def test_large_models_keep_their_weights_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emit_onnx, "MAX_INLINE_BYTES", 100_000)
    export("gpt2", "all", tmp_path / "model.onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    assert (tmp_path / "model.onnx.data").stat().st_size > 500_000 > (tmp_path / "model.onnx").stat().st_size
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in ("model.onnx", "model.onnx.data"):
        (tmp_path / name).rename(moved / name)
    ids = zoo.batch()
    expected = oracles.ladder_logits(zoo.shared("gpt2"), emitted.layers("gpt2", "all"), ids)
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    assert oracles.relative_error(run(moved / "model.onnx", ids, positions), expected) <= 1e-5


def test_a_difference_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(model: torch.nn.Module, path: Path) -> None:
        """A model whose logits are all 0, in place of the export."""
        ids, positions, logits = (
            helper.make_tensor_value_info(name, kind, ["batch", "length", *rest])
            for name, kind, rest in (
                ("input_ids", TensorProto.INT64, []),
                ("position_ids", TensorProto.INT64, []),
                ("logits", TensorProto.FLOAT, [256]),
            )
        )
        width = helper.make_tensor("width", TensorProto.INT64, [1], [256])
        nodes = [
            helper.make_node("Shape", ["input_ids"], ["rows"]),
            helper.make_node("Concat", ["rows", "width"], ["shape"], axis=0),
            helper.make_node("ConstantOfShape", ["shape"], ["logits"]),
        ]
        graph = helper.make_graph(nodes, "zeros", [ids, positions], [logits], [width])
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)

    monkeypatch.setattr(emit_onnx, "_write", zeros)
    with pytest.raises(VerificationError, match="differs from torch"):
        export("llama", "all", tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_text("mine")
    with pytest.raises(RewriterError, match="exists already"):
        export("llama", "all", tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").read_text() == "mine"
    with pytest.raises(RewriterError, match="no such directory"):
        export("llama", "all", tmp_path / "nowhere" / "model.onnx")
    with pytest.raises(RewriterError, match=r"config\.json: cannot be read: No such file"):
        export_onnx(tmp_path, tmp_path / "other.onnx")


@pytest.mark.parametrize("package", ["onnx", "onnxruntime", "onnxscript"])
def test_the_missing_extra_is_named(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(RewriterError, match=rf"needs the package {package}\. .*pip install 'rewriter\[onnx\]'"):
        export("llama", "all", tmp_path / "model.onnx")


def test_code_that_no_manifest_vouches_for_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(model: torch.nn.Module, path: Path) -> None:
        raise RewriterError(f"{type(model).__module__} runs")

    monkeypatch.setattr(emit_onnx, "_write", write)
    words = ["export", str(emitted.emitted("llama", "all")), "--onnx", str(tmp_path / "model.onnx")]
    assert main(words) == 2
    assert "no rewrite.json" in capsys.readouterr().err
    assert main([*words, "--trust-remote-code"]) == 2
    assert re.search(r"error: transformers_modules\.\S+ runs", capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    """Else what onnxruntime computes would be compared with what it was exported from."""
    quantized_checkpoints.make("fp8-blocks", tmp_path / "model", "bfloat16")
    with pytest.raises(RewriterError, match=r"its weights are quantized.*--dequantize"):
        export_onnx(tmp_path / "model", tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()

"""Every verification runs the ranks on the real weights: faults in a rank's weights fail it; memory is bounded."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from oracles import relative_error
from safetensors.torch import load_file, save_file
from torch import nn

import rewriter as rw
from rewriter.check import real_weights
from rewriter.check.comparison import Verification
from rewriter.check.real_weights import compare_ranks, streamed_model
from rewriter.check.reference_modes import original_logits
from rewriter.common.errors import VerificationError
from rewriter.ir import Program
from rewriter.weights import streaming
from rewriter.weights.streaming import stream_parameters

WEIGHTS = "runtime/tp2/weights.json"
MESH = {"tp": 2}


def written(program: Program, out: Path) -> Path:
    rw.save(program, out, options=rw.SaveOptions(verify="none"))
    return out


@pytest.fixture(scope="module")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Program, Path]:
    root = tmp_path_factory.mktemp("real")
    zoo.save("llama_tied", root / "source")
    program = rw.rewrite(rw.trace(root / "source"), "ladder", tp=2)
    return program, written(program, root / "out")


def shifted(table: Any) -> None:
    """One row further, on one rank."""
    name = "model.layers.1.mlp.down_proj.weight"
    source, dim, ranges = table["parameters"][name]
    (start, stop), *_ = ranges[0]
    table["parameters"][name] = [source, dim, [[[start + 1, stop + 1]], ranges[1]]]


def swapped(table: Any) -> None:
    """Two ranks hold each other's part of one weight."""
    source, dim, ranges = table["parameters"]["model.layers.2.self_attn.o_proj.weight"]
    table["parameters"]["model.layers.2.self_attn.o_proj.weight"] = [source, dim, ranges[::-1]]


@pytest.mark.parametrize("fault", [shifted, swapped])
def test_a_fault_in_one_weight_is_found(
    fault: Callable[[Any], None], ladder: tuple[Program, Path], tmp_path: Path
) -> None:
    program, out = ladder
    broken = tmp_path / "out"
    shutil.copytree(out, broken)
    table = json.loads((broken / WEIGHTS).read_text())
    fault(table)
    (broken / WEIGHTS).write_text(json.dumps(table))
    manifest = json.loads((broken / "rewrite.json").read_text())  # what is wrong from the start has the right hash
    manifest["files"][WEIGHTS] = hashlib.sha256((broken / WEIGHTS).read_bytes()).hexdigest()
    (broken / "rewrite.json").write_text(json.dumps(manifest))
    with pytest.raises(VerificationError, match="real weights: sharded module on 2 ranks = its reference"):
        compare_ranks(program, MESH, broken, Verification())


def test_a_broken_tie_is_found(tmp_path: Path) -> None:
    """The ranks use the embeddings as head where the checkpoint holds another one."""
    zoo.save("llama_tied", tmp_path / "source")
    wrong = rw.rewrite(rw.trace(tmp_path / "source"), "tensor-parallel", tp=2)
    out = written(wrong, tmp_path / "out")
    tensors = load_file(tmp_path / "source/model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, tmp_path / "source/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(VerificationError, match="real weights: sharded module on 2 ranks = original model"):
        compare_ranks(wrong, MESH, out, Verification())


def test_it_is_part_of_every_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo.save("llama", tmp_path / "source")
    program = rw.rewrite(rw.trace(tmp_path / "source"), "tensor-parallel", tp=2)
    report = rw.save(program, tmp_path / "out")
    assert report.verification["real weights: sharded module on 2 ranks = original model"] <= 1e-4

    from rewriter.emit.files import output_files

    right = output_files.references_text

    def wrong(references: Any, checkpoint: Any) -> str:
        table = json.loads(right(references, checkpoint))
        if checkpoint.directory.name == ".broken.rewriting":  # not the shrunken copy
            swapped(table)
        return json.dumps(table)

    monkeypatch.setattr(output_files, "references_text", wrong)
    with pytest.raises(VerificationError, match="real weights: sharded module"):
        rw.save(program, tmp_path / "broken")
    assert not (tmp_path / "broken").exists()


def test_what_does_not_fit_is_read_as_it_is_used(ladder: tuple[Program, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    program, out = ladder
    in_memory, streamed = Verification(), Verification()
    compare_ranks(program, MESH, out, in_memory)
    monkeypatch.setattr(real_weights, "too_large", lambda *_: "too large")
    compare_ranks(program, MESH, out, streamed)
    (name,) = streamed.figures()
    assert abs(in_memory.figures()[name] - streamed.figures()[name]) <= 1e-6


@pytest.mark.parametrize("family", ["llama_tied", "gpt2", "mixtral", "gemma2"])
def test_a_streamed_model_is_the_model(family: str, tmp_path: Path) -> None:
    zoo.save(family, tmp_path / family)
    ids = zoo.batch(1, 11)
    expected = original_logits(zoo.shared(family), ids)
    assert relative_error(original_logits(streamed_model(tmp_path / family, False, None), ids), expected) <= 1e-6


def test_few_weights_are_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "KEPT", 3 * 64 * 64 * 4)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False, device="meta") for _ in range(12)))
    alive: list[int] = []
    made: list[Any] = []

    def read(name: str) -> torch.Tensor:
        import weakref

        tensor = torch.eye(64) * (int(name.split(".")[0]) + 1)
        made.append(weakref.ref(tensor))
        alive.append(sum(ref() is not None for ref in made))
        return tensor

    stream_parameters(model, read)
    with torch.no_grad():
        result = model(torch.ones(1, 64))
    assert float(result[0, 0]) == float(torch.arange(1, 13, dtype=torch.float64).prod())
    assert max(alive) <= 4
    assert len(made) == 12

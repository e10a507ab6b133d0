"""Which files of an output serving engines take for weights, and that all of the model is there."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path
from typing import Any

import emitted
import pytest
import torch
import zoo
from safetensors.torch import load_file

from rewriter import api
from rewriter.common.errors import VerificationError
from rewriter.convert.rewritten_source import open_output, write_source
from rewriter.output.manifest import FORMER_GOLDEN, GOLDEN, read_manifest
from rewriter.output.names import MANIFEST
from rewriter.weights import Checkpoint

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama in one file, with chat templates wherever transformers looks for them."""
    root = tmp_path_factory.mktemp("models") / "small"
    zoo.save("llama", root)
    (root / "chat_template.jinja").write_text("{{ messages }}")
    (root / "chat_template.json").write_text('{"chat_template": "{{ messages }}"}')
    (root / "additional_chat_templates").mkdir()
    (root / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    return root


@pytest.fixture(scope="module")
def out(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its ladder with everything that an output may hold: golden logits, and files of weights for each rank."""
    path = tmp_path_factory.mktemp("out") / "ladder"
    api.convert(source, "ladder-upper-half", out=path, tp=2, options=api.SaveOptions(materialize=True))
    return path


def taken(root: Path) -> dict[str, Any]:
    """The tensors that an engine reads: of every *.safetensors in the root that the index names, as vLLM does."""
    named = set(json.loads((root / INDEX).read_text())["weight_map"].values())
    found = {path.name for path in root.glob("*.safetensors")}
    assert named <= found
    return {name: tensor for file in sorted(found & named) for name, tensor in load_file(root / file).items()}


@pytest.mark.slow
def test_what_an_engine_takes_for_weights_is_the_models(source: Path, out: Path) -> None:
    index = json.loads((out / INDEX).read_text())
    files = [path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()]
    assert {GOLDEN, "runtime/tp2/rank-0.tensors", "runtime/tp2/rank-1.tensors"} <= set(files)
    assert set(fnmatch.filter(files, "*.safetensors")) == set(index["weight_map"].values())  # as the hub's client does
    assert not [path for pattern in ("*.bin", "*.pt", "*.pth") for path in fnmatch.filter(files, pattern)]
    tensors = load_file(source / "model.safetensors")
    assert taken(out).keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())


def test_a_single_file_with_an_index_loads(out: Path) -> None:
    assert [path.name for path in Checkpoint.open(out).files] == ["model.safetensors"]
    golden = load_file(out / GOLDEN)
    with torch.no_grad():
        logits = emitted.load(out)(input_ids=golden["input_ids"]).logits[0, -1]
    torch.testing.assert_close(logits, golden["logits"], rtol=1e-4, atol=1e-4)


def test_chat_templates_come_along(out: Path, tmp_path: Path) -> None:
    names = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/tool_use.jinja")
    original = write_source(open_output(out), tmp_path / "source")
    for name in names:
        assert name in read_manifest(out).files
        assert (original / name).read_text() == (out / name).read_text()


@pytest.mark.slow
def test_outputs_with_golden_logits_in_the_root_are_still_read(source: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    api.convert(source, "ladder-upper-half", out=old, tp=2)
    (old / GOLDEN).rename(old / FORMER_GOLDEN)
    (old / GOLDEN).parent.rmdir()
    (old / INDEX).unlink()
    table = json.loads((old / MANIFEST).read_text())
    table["golden"]["file"] = FORMER_GOLDEN
    table["files"][FORMER_GOLDEN] = table["files"].pop(GOLDEN)
    del table["files"][INDEX]
    (old / MANIFEST).write_text(json.dumps(table))
    assert "adapted checkpoint = golden logits" in api.verify(old)
    original = write_source(open_output(old), tmp_path / "source")
    assert {path.name for path in original.glob("*.safetensors")} == {"model.safetensors"}
    api.reshard(old, 4, verify="none")
    assert "tp4" in read_manifest(old).runtime
    (old / FORMER_GOLDEN).write_bytes((old / FORMER_GOLDEN).read_bytes()[:-1] + b"x")
    with pytest.raises(VerificationError, match=r"golden\.safetensors: changed since it was written"):
        api.verify(old)

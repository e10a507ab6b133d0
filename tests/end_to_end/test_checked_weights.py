"""Weights that are not those that `rewrite` wrote for this rank: refused when they are loaded, before anything runs."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from ranks import run_ranks
from refusals import Capture, refused
from safetensors.torch import load_file, save_file
from tiny_tokenizer import add_tokenizer

import rewriter as rw
from rewriter import AdaptOptions, api
from rewriter.cli import main
from rewriter.common.errors import RewriterError, VerificationError
from rewriter.runtime import load

MATERIALIZED, REFERENCES = "files", "references"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Outputs of two ranks, which have files, or read ranges of the checkpoint."""
    root = tmp_path_factory.mktemp("checked")
    zoo.save("llama", root / "m")
    add_tokenizer(root / "m")
    program = rw.rewrite(rw.trace(root / "m"), "ladder", tp=2)
    for name in (MATERIALIZED, REFERENCES):
        rw.save(program, root / name, options=rw.SaveOptions(verify="none", materialize=name == MATERIALIZED))
    return {name: root / name for name in (MATERIALIZED, REFERENCES)}


@pytest.fixture
def outputs(written: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Copies to be spoilt; the working directory is beside them."""
    for name, path in written.items():
        shutil.copytree(path, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return {name: tmp_path / name for name in written}


def refusal_of_load(group: Any, directory: str, check: bool) -> str:
    try:
        load(directory, device="cpu", check=check)
    except RewriterError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusals(out: Path, check: bool = False) -> list[str]:
    return run_ranks(refusal_of_load, 2, str(out), check)


def flip(path: Path, offset: int = -5) -> None:
    """Change one bit of the data; size and header stay."""
    with open(path, "r+b") as file:
        file.seek(offset, os.SEEK_END)
        (value,) = file.read(1)
        file.seek(offset, os.SEEK_END)
        file.write(bytes([value ^ 1]))


def rank_file(out: Path, rank: int) -> Path:
    return out / f"runtime/tp2/rank-{rank}.tensors"


@pytest.mark.parametrize("name", [MATERIALIZED, REFERENCES])
def test_what_was_written_loads_with_and_without_a_check(outputs: dict[str, Path], name: str) -> None:
    assert refusals(outputs[name]) == refusals(outputs[name], check=True) == ["", ""]


def test_exchanged_files_of_ranks_are_refused_by_rank(outputs: dict[str, Path]) -> None:
    out = outputs[MATERIALIZED]
    rank_file(out, 0).rename(out / "kept")
    rank_file(out, 1).rename(rank_file(out, 0))
    (out / "kept").rename(rank_file(out, 1))
    for rank, message in enumerate(refusals(out)):
        assert f"rank-{rank}.tensors: it holds the weights of rank {1 - rank}, not of rank {rank}" in message


def test_the_file_of_another_mesh_is_refused(outputs: dict[str, Path], tmp_path: Path) -> None:
    """The same number of a rank, of twice as many: a file that a wrong copy puts there."""
    source = outputs[MATERIALIZED].parent / "again"
    zoo.save("llama", source)
    rw.save(
        rw.rewrite(rw.trace(source), "ladder", tp=4),
        tmp_path / "four",
        options=rw.SaveOptions(verify="none", materialize=True),
    )
    for rank in range(2):
        shutil.copy(tmp_path / f"four/runtime/tp4/rank-{rank}.tensors", rank_file(outputs[MATERIALIZED], rank))
    for message in refusals(outputs[MATERIALIZED]):
        assert "it holds the weights of mesh tp4, not of mesh tp2" in message


def test_another_layout_of_the_same_rank_is_refused(outputs: dict[str, Path]) -> None:
    files = {rank: rank_file(outputs[MATERIALIZED], rank) for rank in range(2)}
    tensors = {rank: load_file(path) for rank, path in files.items()}
    for rank, path in files.items():
        own = {"format": "pt", "rank": str(rank), "mesh": "tp2"}
        save_file({**tensors[rank], "more": torch.ones(1)}, path, metadata=own)
    for message in refusals(outputs[MATERIALIZED]):
        assert "changed since `rewrite` wrote it: it has" in message
    for rank, path in files.items():
        own = {"format": "pt", "rank": str(rank), "mesh": "tp2"}
        renamed = {"model.norm.weighT" if name == "model.norm.weight" else name: t for name, t in tensors[rank].items()}
        save_file(renamed, path, metadata=own)
    for message in refusals(outputs[MATERIALIZED]):
        assert "changed since `rewrite` wrote it: its header" in message


def test_references_that_were_changed_are_refused(outputs: dict[str, Path]) -> None:
    """Two ranks whose ranges are exchanged compute something, and it is wrong."""
    path = outputs[REFERENCES] / "runtime/tp2/weights.json"
    table = json.loads(path.read_text())
    for _, entry in table["parameters"].items():
        if entry[2]:
            entry[2].reverse()
    path.write_text(json.dumps(table))
    for message in refusals(outputs[REFERENCES]):
        assert message.startswith("VerificationError")
        assert "weights.json: changed since it was written" in message


@pytest.mark.parametrize("name", [MATERIALIZED, REFERENCES])
def test_a_bit_that_changed_is_found_where_contents_are_checked(outputs: dict[str, Path], name: str) -> None:
    files = {rank: rank_file(outputs[name], rank) for rank in range(2)}
    if name == REFERENCES:
        files = dict.fromkeys(range(2), outputs[name] / "model.safetensors")
    for path in set(files.values()):
        flip(path)
    assert refusals(outputs[name]) == ["", ""]  # what reading every byte would cost is not spent unasked
    for rank, message in enumerate(refusals(outputs[name], check=True)):
        assert message.startswith("VerificationError")
        assert f"{files[rank].name}: changed since it was written (sha256" in message


@pytest.mark.slow
def test_generate_refuses_swapped_and_damaged_weights(
    outputs: dict[str, Path], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REWRITER_DEBUG", raising=False)
    words = ("--prompt", "hello", "--max-new-tokens", "2")
    assert main(["generate", MATERIALIZED, "--check", *words]) == 0
    capsys.readouterr()
    flip(rank_file(outputs[MATERIALIZED], 0))
    assert "rank-0.tensors: changed since it was written" in refused(
        capsys, "generate", MATERIALIZED, "--check", *words, code=3
    )
    shutil.copy(rank_file(outputs[MATERIALIZED], 0), rank_file(outputs[MATERIALIZED], 1))
    assert "it holds the weights of rank 0, not of rank 1" in refused(capsys, "generate", MATERIALIZED, *words)


def test_the_single_device_model_is_checked_when_asked(outputs: dict[str, Path]) -> None:
    out = outputs[REFERENCES]
    flip(out / "model.safetensors")
    rw.load(out)
    with pytest.raises(VerificationError, match=r"model\.safetensors: changed since it was written"):
        rw.load(out, check=True)


def test_nothing_is_trained_on_weights_that_changed(outputs: dict[str, Path], tmp_path: Path) -> None:
    """Training reads them all anyway, so that every bit is compared."""
    out = outputs[REFERENCES]
    (out / "README.md").write_text("My own card.")
    flip(out / "model.safetensors")
    with pytest.raises(VerificationError, match=r"model\.safetensors: changed since it was written"):
        api.adapt(out, out=tmp_path / "adapted", options=AdaptOptions(tokens=64))
    assert not list(tmp_path.glob("*adapted*"))


def test_the_single_device_model_of_another_layout_is_refused(outputs: dict[str, Path]) -> None:
    path = outputs[REFERENCES] / "model.safetensors"
    tensors = load_file(path)
    save_file({f"_{name}": tensor for name, tensor in tensors.items()}, path, {"format": "pt"})
    with pytest.raises(RewriterError, match="changed since `rewrite` wrote the weights of the ranks"):
        rw.load(outputs[REFERENCES])

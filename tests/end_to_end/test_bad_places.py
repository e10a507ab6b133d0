"""A folder, or a link to itself, where a command expects a file: one error that names it, and nothing is changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from refusals import Capture, refused
from tiny_tokenizer import add_tokenizer

from rewriter import api


def folder(place: Path) -> None:
    place.mkdir()


def loop(place: Path) -> None:
    place.symlink_to(place.name)


def device(place: Path) -> None:
    """It never ends, and is no file."""
    place.symlink_to("/dev/zero")


Put = Callable[[Path], None]
OF_MODEL = ("config.json", "model.safetensors", "generation_config.json")
OF_OUTPUT = ("rewrite.json", "config.json", "model.safetensors", "runtime/tp2/module.py", "runtime/tp2/weights.json")
GIVEN = {
    "recipe.yaml": ["m", "--recipe", "recipe.yaml", "--out", "new"],
    "fabric.yaml": ["predict", "m", "--recipe", "ladder", "--fabric", "fabric.yaml"],
    "prompts.txt": ["generate", "out", "--prompts", "prompts.txt"],
    "prompts.jsonl": ["generate", "out", "--prompts", "prompts.jsonl"],
    "text.txt": ["m", "--recipe", "drop-sync", "--tp", "2", "--calibration", "text.txt", "--out", "new"],
    "data.jsonl": ["adapt", "out", "--out", "new", "--data", "data.jsonl"],
}


@pytest.fixture(scope="module")
def made(good: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What was made of the good model, with a tokenizer, on two ranks."""
    root = tmp_path_factory.mktemp("made")
    shutil.copytree(good, root / "m")
    add_tokenizer(root / "m")
    api.convert(root / "m", "ladder", out=root / "out", tp=2, options=api.SaveOptions(verify="none"))
    return root / "out"


@pytest.mark.parametrize("put", [folder, loop])
def test_in_place_of_the_tokenizer(model: Path, capsys: Capture, put: Put) -> None:
    add_tokenizer(model)
    (model / "tokenizer.json").unlink()
    put(model / "tokenizer.json")
    assert "tokenizer.json" in refused(capsys, "m", "--recipe", "ladder", "--out", "out")


@pytest.mark.parametrize("put", [folder, loop])
@pytest.mark.parametrize("name", OF_MODEL)
def test_in_place_of_a_file_of_the_model(model: Path, capsys: Capture, name: str, put: Put) -> None:
    (model / name).unlink(missing_ok=True)
    put(model / name)
    assert name in refused(capsys, "m", "--recipe", "ladder", "--out", "out")


@pytest.mark.parametrize("put", [folder, loop])
@pytest.mark.parametrize("name", OF_OUTPUT)
def test_in_place_of_a_file_of_an_output(model: Path, made: Path, capsys: Capture, name: str, put: Put) -> None:
    shutil.copytree(made, "out")
    (Path("out") / name).unlink()
    put(Path("out") / name)
    message = refused(capsys, "verify", "out", code=2 if name == "rewrite.json" else 3)
    assert Path(name).name in message
    if not name.startswith("runtime"):
        trained = refused(
            capsys, "adapt", "out", "--out", "new", code=2 if name in ("rewrite.json", "config.json") else 3
        )
        assert Path(name).name in trained


@pytest.mark.parametrize("put", [folder, loop, device])
@pytest.mark.parametrize("name", GIVEN)
def test_in_place_of_a_file_that_is_given(model: Path, made: Path, capsys: Capture, name: str, put: Put) -> None:
    if "out" in GIVEN[name]:
        shutil.copytree(made, "out")
    put(Path(name))
    assert name in refused(capsys, *GIVEN[name])

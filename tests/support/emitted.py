"""Emitted checkpoints for tests: the modeling file and config beside copies of the weights, one directory per case."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import zoo
from repository import ROOT
from transformers import AutoModelForCausalLM, PreTrainedModel

from rewriter.emit.huggingface import HuggingFaceFiles, emit_huggingface
from rewriter.ir import Program
from rewriter.passes.ladder import Ladder
from rewriter.tracing import trace

SELECTIONS = ("all", "upper-half", "scattered")


@functools.cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="emitted-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@functools.cache
def source(family: str) -> Path:
    """A checkpoint of `family` as a user has it."""
    path = _root() / f"source-{family}"
    zoo.save(family, path)
    return path


@functools.cache
def program(family: str) -> Program:
    """`family`, traced."""
    return trace(source(family))


def layers(family: str, selection: str) -> set[int]:
    """The ladder layers of a selection."""
    return zoo.selections(program(family).source.num_layers)[selection]


@functools.cache
def ladder(family: str, selection: str) -> Program:
    """`family` with the ladder on a selection of layers."""
    return Ladder(sorted(layers(family, selection))).apply(program(family))


@functools.cache
def emitted(family: str, selection: str) -> Path:
    """The adapted checkpoint of `ladder(family, selection)`."""
    path = _root() / f"{family}-{selection}"
    write(emit_huggingface(ladder(family, selection)), source(family), path)
    return path


def write(files: HuggingFaceFiles, weights: Path, out: Path) -> None:
    """Put the emitted files beside copies of everything but the config in `weights`."""
    out.mkdir(parents=True)
    for file in weights.iterdir():
        if file.name != "config.json":
            shutil.copy(file, out)
    (out / "config.json").write_text(json.dumps(files.config, indent=2))
    if files.modeling_name is not None and files.modeling is not None:
        (out / files.modeling_name).write_text(files.modeling)


def load(path: Path, auto: Any = AutoModelForCausalLM, **options: Any) -> PreTrainedModel:
    """The model at `path` in eval mode, by its own code; eager attention and experts by default."""
    options = {"attn_implementation": "eager", "experts_implementation": "eager", **options}
    return auto.from_pretrained(path, trust_remote_code=True, **options).eval()


@functools.cache
def shared(family: str, selection: str, attention: str = "eager") -> PreTrainedModel:
    """`load(emitted(…))`, made once per process. For tests that do not change the model."""
    return load(emitted(family, selection), attn_implementation=attention)


def layers_of(model: PreTrainedModel) -> torch.nn.ModuleList:
    """The decoder layers of an emitted causal LM, whose model type the oracles do not know."""
    return model.base_model.h if "gpt2" in model.config.model_type else model.base_model.layers


def left_padded(prompts: list[list[int]], padding: int = 0) -> dict[str, torch.Tensor]:
    """input_ids and attention_mask, int64 (batch, longest), of prompts filled up on the left."""
    length = max(map(len, prompts))
    ids = torch.tensor([[padding] * (length - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def edited(rewritten: Program, edit: Callable[[Any], None]) -> Program:
    """`rewritten` after `edit(graph)` on a copy of its wiring."""
    graph, _ = rewritten.edit()
    edit(graph)
    return rewritten.with_(graph=graph)


def modeling(program: Program) -> str:
    """The modeling file of `program`."""
    text = emit_huggingface(program).modeling
    assert text is not None
    return text


def assert_clean_modeling(programs: dict[str, Program], directory: Path) -> None:
    """The modeling files of programs by name, written to `directory`, are clean."""
    for name, program in programs.items():
        (directory / f"{name.replace('-', '_')}.py").write_text(modeling(program))
    assert_clean(directory)


def assert_clean(directory: Path) -> None:
    """The Python files of a directory are formatted and pass every check of this project."""
    pyproject = ROOT / "pyproject.toml"
    for command in (["format", "--diff"], ["check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "--config", str(pyproject), str(directory)]
        result = subprocess.run(ruff, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr

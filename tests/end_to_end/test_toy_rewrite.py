"""The pass that docs/howto/add-a-pass.md prints. Nothing else in the project knows of it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import zoo
from page_files import page_files
from repository import ROOT
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from rewriter import api
from rewriter.check.comparison import relative_error
from rewriter.check.shrunken_check import check_shrunken
from rewriter.common.errors import RewriterError, VerificationError
from rewriter.output.manifest import GOLDEN, read_manifest
from rewriter.output.sum_schedule import Sum, schedule_of
from rewriter.recipes import Recipe


def printed(file: str) -> Any:
    """The module that the page prints, handed over to recipes and not installed."""
    module = ModuleType(Path(file).stem)
    exec(compile(page_files(ROOT / "docs/howto/add-a-pass.md")[file], file, "exec", dont_inherit=True), module.__dict__)
    return module


DAMP = printed("rewriter_damp.py")
Damp = DAMP.Damp


def halved(model: PreTrainedModel, layers: Collection[int]) -> AbstractContextManager[PreTrainedModel]:
    return DAMP.damped(model, layers, 0.5)


RECIPE = """
name: damp
summary: Half of what each block computes, in the upper half of the layers.
paper: "none: an example"
passes:
  - pass: tensor_parallel
  - pass: damp
    layers: upper-half
  - pass: overlap
    optional: true
"""


def recipe() -> Recipe:
    return Recipe.parse(RECIPE).knowing(Damp)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "llama"
    zoo.save("llama", directory)
    return directory


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "damped-0.5"
    api.convert(source, recipe(), out=out, tp=2)
    return out


@torch.no_grad()
def test_the_checkpoint_computes_what_the_oracle_does(converted: Path) -> None:
    model, ids = zoo.shared("llama"), zoo.batch()
    original = model(ids).logits
    with halved(model, [2, 3]):
        expected = model(ids).logits
    assert relative_error(expected, original) >= 1e-2
    written = AutoModelForCausalLM.from_pretrained(converted, trust_remote_code=True)
    assert relative_error(written(ids).logits, expected) <= 1e-5


def test_both_emitted_models_were_compared_with_the_oracle(converted: Path) -> None:
    checks = [check.name for check in read_manifest(converted).verification.checks]
    assert checks == [
        "trace = original model",
        "rewritten = its reference",
        "2 simulated ranks = 1 device",
        "adapted checkpoint = rewritten",
        "sharded module on 2 ranks = rewritten",
        "real weights: sharded module on 2 ranks = its reference",
    ]


@torch.no_grad()
def test_the_golden_logits_are_the_oracles(converted: Path) -> None:
    golden = load_file(converted / GOLDEN)
    with halved(zoo.shared("llama"), [2, 3]) as model:
        expected = model(golden["input_ids"]).logits[0, -1]
    assert relative_error(golden["logits"], expected) <= 1e-5


def test_generated_code_is_named_after_the_mode(converted: Path) -> None:
    assert "class DampedLlamaDecoderLayer" in (converted / "runtime" / "tp2" / "module.py").read_text()


def test_it_is_inspected(source: Path) -> None:
    data = api.inspect(source / "config.json", recipe(), tp=2).data
    assert [entry["name"] for entry in data["passes"]] == ["tensor_parallel", "damp", "overlap"]
    assert [block["mode"] for block in data["blocks"]] == ["standard"] * 4 + ["damped-0.5"] * 4


def test_its_plan_and_its_diff_name_its_mode(source: Path) -> None:
    plan = api.inspect(source / "config.json", recipe(), tp=2).plan
    assert re.search(r"^layers 2–3: .*\n.*\n  self_attn +damped-0.5 +x +at once", plan, re.MULTILINE)
    difference = api.diff(source / "config.json", recipe=recipe(), tp=2)
    layers = json.loads(difference.to_json())["layers"]
    assert [[block["mode"] for block in layer["after"]["blocks"]] for layer in layers] == [
        ["standard", "standard"], ["damped-0.5", "damped-0.5"],
    ]  # fmt: skip


def test_an_engine_is_told_what_its_mode_means(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    assert config["rewriter_modes"] == {"standard": {}, "damped-0.5": {"factor": 0.5}}
    steps = schedule_of(SimpleNamespace(**config)).layers
    assert [[(step.factor, step.sum) for step in layer] for layer in steps] == [
        [(factor, Sum.INSIDE)] * 2 for factor in (1.0, 1.0, 0.5, 0.5)
    ]


def test_it_is_predicted(source: Path) -> None:
    found = api.predict(source / "config.json", ["tensor-parallel", recipe()], api.Workload(tp=2))
    assert [prediction.recipe for prediction in found.predictions] == ["tensor-parallel", "damp"]


def test_a_fault_in_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Damp.apply
    monkeypatch.setattr(Damp, "apply", lambda self, program: right(Damp(layers="last:1"), program))
    with pytest.raises(VerificationError, match="rewritten = its reference"):
        check_shrunken(zoo.config("llama"), [Damp(layers="upper-half")])


def test_without_an_oracle_it_is_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Damp, "oracle", None)
    with pytest.raises(RewriterError, match="damp: no independent reference to verify it with"):
        check_shrunken(zoo.config("llama"), [Damp()])


def test_a_recipe_that_does_not_know_it_refuses() -> None:
    with pytest.raises(RewriterError, match="unknown pass 'damp'"):
        Recipe.parse(RECIPE).build()

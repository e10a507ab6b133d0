"""A rewrite in one file: what CONTRIBUTING.md walks through. Nothing else in the project knows of it."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import zoo
from repository import ROOT
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from rewriter import api
from rewriter.check.comparison import relative_error
from rewriter.check.shrunken_check import check_shrunken
from rewriter.common.errors import RewriterError, VerificationError
from rewriter.ir import Program
from rewriter.ir.marks import Mode, mark
from rewriter.output.manifest import GOLDEN, read_manifest
from rewriter.output.sum_schedule import Sum, schedule_of
from rewriter.passes.base import Effect, Pass, record
from rewriter.passes.residual_rewrite import chosen_blocks
from rewriter.passes.selection import Selection, resolve
from rewriter.recipes import Recipe

HALF = Mode("half", "adds half of what it computes", prefix="Half")


@dataclass(frozen=True)
class HalfResidual(Pass):
    """x ← x + f(x) / 2 in the selected layers."""

    layers: Selection = "all"

    name: ClassVar[str] = "half_residual"
    effect: ClassVar[Effect] = "approximating"

    def apply(self, program: Program) -> Program:
        blocks = chosen_blocks(program, self.name, self.layers)
        graph, copy_of = program.edit()
        for block in blocks:
            for write in block.writes:
                written = copy_of[write]
                with graph.inserting_after(written):
                    half = graph.call_function(operator.mul, (written, 0.5))
                written.replace_all_uses_with(half, delete_user_cb=lambda user, half=half: user is not half)
                mark(half, layer=block.layer, block=block.index)
            mark(copy_of[block.add], mode=HALF)
        return record(program, self, f"{len(blocks)} blocks add half of what they compute", graph=graph)

    def oracle(self, model: PreTrainedModel) -> AbstractContextManager[PreTrainedModel]:
        return halved(model, resolve(self.layers, model.config.num_hidden_layers))


@contextmanager
def halved(model: PreTrainedModel, layers: Collection[int]) -> Iterator[PreTrainedModel]:
    """Within the `with`, attention and MLP of these layers of an eager Llama return half of what they compute."""

    def half(module: torch.nn.Module, args: Any, output: Any) -> Any:
        return (output[0] / 2, *output[1:]) if isinstance(output, tuple) else output / 2

    chosen = [model.model.layers[layer] for layer in layers]
    handles = [m.register_forward_hook(half) for layer in chosen for m in (layer.self_attn, layer.mlp)]
    try:
        yield model
    finally:
        for handle in handles:
            handle.remove()


RECIPE = """
name: half-residual
summary: Half of what each block computes, in the upper half of the layers.
paper: "none: an example"
passes:
  - pass: tensor_parallel
  - pass: half_residual
    layers: upper-half
  - pass: overlap
    optional: true
"""


def recipe() -> Recipe:
    return Recipe.parse(RECIPE).knowing(HalfResidual)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "llama"
    zoo.save("llama", directory)
    return directory


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "half"
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
    assert "class HalfLlamaDecoderLayer" in (converted / "runtime" / "tp2" / "module.py").read_text()


def test_it_is_inspected(source: Path) -> None:
    data = api.inspect(source / "config.json", recipe(), tp=2).data
    assert [entry["name"] for entry in data["passes"]] == ["tensor_parallel", "half_residual", "overlap"]
    assert [block["mode"] for block in data["blocks"]] == ["standard"] * 4 + ["half"] * 4


def test_its_plan_and_its_diff_name_its_mode(source: Path) -> None:
    plan = api.inspect(source / "config.json", recipe(), tp=2).plan
    assert re.search(r"^layers 2–3: .*\n.*\n  self_attn +half +x +at once", plan, re.MULTILINE)
    difference = api.diff(source / "config.json", recipe=recipe(), tp=2)
    layers = json.loads(difference.to_json())["layers"]
    assert [[block["mode"] for block in layer["after"]["blocks"]] for layer in layers] == [
        ["standard", "standard"], ["half", "half"],
    ]  # fmt: skip


def test_an_engine_is_told_what_its_mode_means(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    assert config["rewriter_modes"] == {"standard": {}, "half": {"factor": 0.5}}
    steps = schedule_of(SimpleNamespace(**config)).layers
    assert [[(step.factor, step.sum) for step in layer] for layer in steps] == [
        [(factor, Sum.INSIDE)] * 2 for factor in (1.0, 1.0, 0.5, 0.5)
    ]


def test_it_is_predicted(source: Path) -> None:
    found = api.predict(source / "config.json", ["tensor-parallel", recipe()], api.Workload(tp=2))
    assert [prediction.recipe for prediction in found.predictions] == ["tensor-parallel", "half-residual"]


def test_a_fault_in_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = HalfResidual.apply
    monkeypatch.setattr(HalfResidual, "apply", lambda self, program: right(HalfResidual("last:1"), program))
    with pytest.raises(VerificationError, match="rewritten = its reference"):
        check_shrunken(zoo.config("llama"), [HalfResidual("upper-half")])


def test_without_an_oracle_it_is_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HalfResidual, "oracle", None)
    with pytest.raises(RewriterError, match="half_residual: no independent reference to verify it with"):
        check_shrunken(zoo.config("llama"), [HalfResidual()])


def test_a_recipe_that_does_not_know_it_refuses() -> None:
    with pytest.raises(RewriterError, match="unknown pass 'half_residual'"):
        Recipe.parse(RECIPE).build()


def test_the_chapter_is_this_file() -> None:
    """Every Python and YAML block of the chapter stands here, line for line."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    chapter = page.split("## Add a rewrite in an hour")[1].split("\n## ")[0]
    blocks = re.findall(r"```(?:python|yaml)\n(.*?)```", chapter, re.DOTALL)
    assert len(blocks) >= 5
    here = Path(__file__).read_text(encoding="utf-8")
    for block in blocks:
        assert block in here, block

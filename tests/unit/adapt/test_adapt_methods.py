"""The methods of `rewrite adapt`: distillation, adapters, a quantized base, from scratch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import adapted
import pytest
import torch
from adapt_runs import run
from safetensors.torch import load_file

from rewriter.adapt import output, students
from rewriter.adapt.loop import read_metrics
from rewriter.training.zero.frozen import FrozenLinear


def test_a_distilled_model_follows_the_original_not_the_data(tmp_path: Path) -> None:
    report = run(tmp_path / "out", method="distill")
    lines = read_metrics(tmp_path / "out" / "training")
    assert lines[-1]["divergence"] == lines[-1]["loss"] < 0.9 * lines[0]["loss"]
    assert abs(report.losses["after"] - report.losses["original"]) < 0.5
    assert report.losses["after"] > 6, "a random teacher's predictions are no better than before"


@pytest.mark.slow
def test_with_adapters_the_teacher_has_no_weights_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, Any]] = []
    original = students.teacher

    def watched(built: Any, *args: Any) -> Any:
        made.append((built, original(built, *args)))
        return made[-1][1]

    monkeypatch.setattr(students, "teacher", watched)
    run(tmp_path / "out", method="distill", lora=4)
    built, theirs = made[0]
    held = {p.untyped_storage().data_ptr() for p in built.model.module.parameters()}
    assert {p.untyped_storage().data_ptr() for p in theirs.module.parameters()} <= held
    before = load_file(adapted.directory("ladder") / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "proj" in name}


@pytest.mark.slow
def test_a_quantized_base_is_read_and_the_exact_one_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """int8 holds a quarter of fp32 and its scales; only adapters move; what is stored is the source's weights with
    them, not the dequantized ones."""
    done, before, after = [], {}, {}
    quantize, merge = students.quantize_frozen, output.merge

    def quantized(module: Any, format: str) -> Any:
        done.append(quantize(module, format))
        before.update({n: p.detach().clone() for n, p in module.named_parameters()})
        return done[-1]

    def merged(built: Any) -> None:
        module = built.model.module
        after.update({n: p.detach().clone() for n, p in module.named_parameters()})
        after["base"] = {n: m.dequantized() for n, m in module.named_modules() if isinstance(m, FrozenLinear)}
        merge(built)

    monkeypatch.setattr(students, "quantize_frozen", quantized)
    monkeypatch.setattr(output, "merge", merged)
    source = adapted.directory("ladder", hidden=256)
    out = tmp_path / "out"
    run(out, files=(source, adapted.text_file(), adapted.text_file(20, 1)), lora=4, base="int8")

    assert len(done[0].weights) == 4 * 5  # of each layer all but keys and values, which are small
    assert 0.25 < done[0].after / done[0].before < 0.27
    moved = {n for n in before if not torch.equal(before[n], after[n])}
    assert moved == {n for n in before if "lora_" in n}
    stored, exact = load_file(out / "model.safetensors"), load_file(source / "model.safetensors")
    for name, base in after["base"].items():
        path = name.removesuffix(".base_layer")
        key = path.removeprefix("base_model.model.") + ".weight"
        change = 2 * after[f"{path}.lora_B.default.weight"] @ after[f"{path}.lora_A.default.weight"]
        assert (stored[key] == (exact[key].float() + change).bfloat16()).float().mean() > 0.999, key
        assert (stored[key] == (base + change).bfloat16()).float().mean() < 0.8, key
    for name in exact:
        assert torch.equal(stored[name], exact[name]) or "proj" in name, name


def test_from_scratch_starts_from_random_weights(tmp_path: Path) -> None:
    report = run(tmp_path / "out", from_scratch=True)
    assert "original" not in report.losses
    assert abs(report.losses["before"] - math.log(264)) < 0.2
    assert report.losses["after"] < report.losses["before"] - 0.5

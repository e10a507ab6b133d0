"""The methods of `rewrite adapt`: distillation, adapters, a quantized base, annealing, from scratch, refitting."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import adapted
import pytest
import torch
from adapt_runs import run
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rewriter.adapt import adapted_output, student_setup
from rewriter.adapt.refit import RIDGE, refit
from rewriter.adapt.run_log import read_metrics
from rewriter.adapt.run_ranks import RunRanks
from rewriter.tracing.meta_model import find_layers
from rewriter.training.zero.frozen import FrozenLinear


def test_a_distilled_model_follows_the_original_not_the_data(tmp_path: Path) -> None:
    report = run(tmp_path / "out", method="distill")
    lines = read_metrics(tmp_path / "out" / "training")
    assert lines[-1]["divergence"] == lines[-1]["loss"] < 0.9 * lines[0]["loss"]
    assert abs(report.losses["after"] - report.losses["original"]) < 0.5
    assert report.losses["after"] > 6, "a random teacher's predictions are no better than before"


def test_with_adapters_the_teacher_has_no_weights_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, Any]] = []
    original = student_setup.teacher

    def watched(built: Any, *args: Any) -> Any:
        made.append((built, original(built, *args)))
        return made[-1][1]

    monkeypatch.setattr(student_setup, "teacher", watched)
    run(tmp_path / "out", method="distill", lora=4)
    built, theirs = made[0]
    held = {p.untyped_storage().data_ptr() for p in built.model.module.parameters()}
    assert {p.untyped_storage().data_ptr() for p in theirs.module.parameters()} <= held
    before = load_file(adapted.directory("ladder") / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "proj" in name}


def test_a_quantized_base_is_read_and_the_exact_one_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """int8 holds a quarter of fp32 and its scales; only adapters move; what is stored is the source's weights with
    them, not the dequantized ones."""
    done, before, after = [], {}, {}
    quantize, merge = student_setup.quantize_frozen, adapted_output.merge

    def quantized(module: Any, format: str) -> Any:
        done.append(quantize(module, format))
        before.update({n: p.detach().clone() for n, p in module.named_parameters()})
        return done[-1]

    def merged(built: Any) -> None:
        module = built.model.module
        after.update({n: p.detach().clone() for n, p in module.named_parameters()})
        after["base"] = {n: m.dequantized() for n, m in module.named_modules() if isinstance(m, FrozenLinear)}
        merge(built)

    monkeypatch.setattr(student_setup, "quantize_frozen", quantized)
    monkeypatch.setattr(adapted_output, "merge", merged)
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


def test_annealing_begins_at_the_original_and_ends_at_the_recipe(tmp_path: Path) -> None:
    run(tmp_path / "out", method="distill", anneal=4)
    lines = read_metrics(tmp_path / "out" / "training")
    assert abs(lines[0]["loss"]) < 1e-6, "at λ = 0 the student is its teacher"
    assert lines[1]["loss"] > 1e-2
    assert "annealing" not in (tmp_path / "out" / "modeling_rewriter_llama.py").read_text()


def test_from_scratch_starts_from_random_weights(tmp_path: Path) -> None:
    report = run(tmp_path / "out", from_scratch=True)
    assert "original" not in report.losses
    assert abs(report.losses["before"] - math.log(264)) < 0.2
    assert report.losses["after"] < report.losses["before"] - 0.5


@pytest.mark.parametrize(("recipe", "tp"), [("ladder", 1), ("desync-4x-sum", 2)])
def test_refitted_layers_give_what_the_original_gives(recipe: str, tp: int, tmp_path: Path) -> None:
    """By a pseudo-inverse over the same tokens: each layer's solution is the one of the normal equations."""
    directory = adapted.directory(recipe, tp)
    student = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, dtype=torch.float32)
    teacher = AutoModelForCausalLM.from_pretrained(adapted.root() / "llama", dtype=torch.float32)
    ids = torch.randint(0, 256, (16, 32), generator=torch.Generator().manual_seed(0))
    batch = {
        "input_ids": ids, "labels": ids, "segment_ids": torch.zeros_like(ids),
        "position_ids": torch.arange(32).expand_as(ids),
    }  # fmt: skip
    before = {name: p.detach().clone() for name, p in student.named_parameters()}
    seen: dict[str, torch.Tensor] = {}
    # the last layer's output projection: its inputs are final when it is fitted
    name = f"{find_layers(student)[0]}.3.mlp.down_proj"
    for model, label in ((student, "z"), (teacher, "x")):
        model.get_submodule(name).register_forward_hook(
            lambda m, args, y, label=label: seen.update({label: args[0].flatten(0, 1), f"{label} out": y})
        )

    def error() -> float:
        with torch.no_grad():
            ours, theirs = (model(input_ids=ids, use_cache=False).logits for model in (student, teacher))
        return float((ours - theirs).norm() / theirs.norm())

    worse = error()
    done = refit(student, teacher, [{k: v[i : i + 8] for k, v in batch.items()} for i in (0, 8)], RunRanks())
    assert done.tokens == 16 * 32
    assert error() < 0.7 * worse
    z, y = seen["z"].double(), seen["x out"].flatten(0, 1).double()
    ridge = RIDGE * z.square().sum() / z.shape[1] * torch.eye(z.shape[1], dtype=torch.float64)
    expected = torch.linalg.solve(z.T @ z + ridge, (y.T @ z + before[f"{name}.weight"].double() @ ridge).T).T
    assert torch.allclose(student.get_submodule(name).weight.double(), expected, rtol=1e-3, atol=1e-4)
    changed = {n for n, p in student.named_parameters() if not torch.equal(p, before[n])}
    assert done.layers == len(changed)
    first = {f"{find_layers(student)[0]}.0.self_attn.{n}_proj.weight" for n in "qkv"}
    assert not changed & first, "what reads the embedding reads what it did"
    assert all("proj" in n for n in changed)


def test_a_run_that_is_refitted_says_so_and_starts_lower(tmp_path: Path) -> None:
    report = run(tmp_path / "out", refit=400, method="distill")
    assert report.losses["original"] < report.losses["before"] or report.losses["refitted"] != report.losses["before"]
    assert report.adaptation["options"]["refit"] == 400
    assert report.adaptation["tokens"] == 6 * 8 * adapted.LENGTH + 400
    plain = run(tmp_path / "other", method="distill")
    first = [read_metrics(tmp_path / name / "training")[0]["loss"] for name in ("out", "other")]
    assert first[0] < 0.8 * first[1]
    assert plain.losses["before"] == report.losses["before"]
    assert "rewritten and refitted, before training" in (tmp_path / "out" / "README.md").read_text()

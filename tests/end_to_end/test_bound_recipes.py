"""Recipes that are bound to their number of ranks, from a checkpoint to a verified output, as a user runs them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from safetensors.torch import load_file

from rewriter import api
from rewriter.check.comparison import relative_error
from rewriter.check.per_rank_reference import LayerMode, PerRankReference
from rewriter.cli import main
from rewriter.common.errors import RewriterError
from rewriter.ir import Program
from rewriter.output.manifest import GOLDEN, read_manifest
from rewriter.passes import desync as desync_module
from rewriter.passes import drop_sync as drop_sync_module

BOUND = ("desync-2x", "desync-4x", "desync-2x-sum", "desync-4x-sum", "ladder-own-partial", "ladder-then-desync")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models") / "small-llama"
    zoo.save("llama", root)
    return root


@pytest.fixture(scope="module")
def written(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The conversion that the fast tests read: measured, chosen, verified and written."""
    out = tmp_path_factory.mktemp("out") / "dropped"
    return out, api.convert(source, "drop-sync", out=out, tp=2)


def test_everything_emitted_was_compared(written: tuple[Path, Any]) -> None:
    manifest = read_manifest(written[0])
    assert [check.name for check in manifest.verification.checks] == [
        "trace = original model",
        "rewritten = its reference",
        "2 simulated ranks = 2 ranks on 1 device",
        "adapted checkpoint = rewritten",
        "sharded module on 2 ranks = rewritten",
        "real weights: sharded module on 2 ranks = its reference",
    ]
    assert manifest.mesh == {"tp": 2}
    assert manifest.verification.drift is not None
    assert 0 < manifest.verification.drift.top1_agreement < 1


def test_manifest_and_card_say_what_was_measured(written: tuple[Path, Any]) -> None:
    out, report = written
    manifest = read_manifest(out)
    [entry] = [e for e in manifest.passes if e.name == "drop_sync"]
    costs = entry.options["sensitivity"]
    assert len(costs) == 4
    assert min(costs) > 0
    cheapest = sorted(sorted(range(4), key=lambda layer: (costs[layer], -layer))[:2])
    assert entry.summary.endswith(f"in 2 of 4 layers: {cheapest[0]}, {cheapest[1]}")
    assert entry.notes[0].startswith("what each layer's drop alone costs, KL in nats per token (512 tokens on 2 ranks")
    assert entry.notes[0] in (out / "README.md").read_text()
    assert entry.notes == next(p for p in report.passes if p["name"] == "drop_sync")["notes"]
    [spec] = [p for p in manifest.recipe["passes"] if p["pass"] == "drop_sync"]
    assert spec["sensitivity"] == costs


def test_golden_logits_are_the_references_on_the_real_weights(written: tuple[Path, Any]) -> None:
    golden = load_file(written[0] / GOLDEN)
    [entry] = [e for e in read_manifest(written[0]).passes if e.name == "drop_sync"]
    dropped = sorted(range(4), key=lambda layer: (entry.options["sensitivity"][layer], -layer))[:2]
    mix = {layer: LayerMode("desync", (False, True), "sum") for layer in dropped}
    with torch.no_grad():
        expected = PerRankReference(zoo.shared("llama"), mix, 2)(golden["input_ids"])[0, -1]
        original = zoo.shared("llama")(golden["input_ids"]).logits[0, -1]
    assert relative_error(golden["logits"], expected) <= 1e-5
    assert relative_error(golden["logits"], original) >= 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", BOUND)
def test_a_bound_recipe_converts_and_verifies(name: str, tp: int, source: Path, tmp_path: Path) -> None:
    report = api.convert(source, name, out=tmp_path / "out", tp=tp, options=api.SaveOptions(verify="full"))
    assert report.verification["real weights: rewritten = its reference"] <= 1e-4
    assert report.verification["real weights: adapted checkpoint = rewritten"] <= 1e-4
    assert report.verification[f"real weights: sharded module on {tp} ranks = rewritten"] <= 1e-4
    assert f"sharded module on {tp} ranks = golden logits" in api.verify(tmp_path / "out")


@pytest.mark.parametrize("name", [*BOUND, "drop-sync"])
def test_one_rank_is_refused_before_any_work(
    name: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("rewriter.tracing"), "trace", lambda *_, **__: pytest.fail("traced"))
    with pytest.raises(RewriterError, match=r"is bound to a number of ranks: .* Give --tp 2 or more"):
        api.convert(source, name, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_optional_bound_pass_is_left_out_on_one_rank(source: Path) -> None:
    from rewriter import rewrite, trace

    program = rewrite(trace(source), "desync-2x", set={"desync.optional": True})
    applied = [e.name for e in program.history]
    assert applied == ["permute", "tensor_parallel", "merge_reductions", "fuse_projections", "overlap"]


@pytest.mark.slow
def test_a_fault_exits_with_3_and_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = desync_module.desynchronise

    def faulty(program: Program, kept: dict[int, bool], resync: Any, *rest: Any) -> Program:
        return whole(program, {**kept, 1: False}, resync, *rest)

    monkeypatch.setattr(desync_module, "desynchronise", faulty)
    assert main([str(source), "--recipe", "desync-2x", "--tp", "2", "--out", str(tmp_path / "out")]) == 3
    assert "rewritten = its reference: worst at row" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_measurement_that_says_otherwise_is_followed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is dropped is what the measurement says, whatever it says: no layer is hard-wired."""
    monkeypatch.setattr("rewriter.check.sensitivity.sensitivity", lambda *_, **__: (0.1, 0.4, None, 0.2))
    report = api.convert(source, "drop-sync", out=tmp_path / "out", tp=2, options=api.SaveOptions(dry_run=True))
    [entry] = [p for p in report.passes if p["name"] == drop_sync_module.DropSync.name]
    assert entry["summary"].endswith("in 1 of 4 layers: 0")

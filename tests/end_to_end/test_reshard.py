"""One checkpoint, modules for several numbers of ranks: made together, or added later; refused where they cannot be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import TestCase

import pytest
import torch
import zoo
from oracles import relative_error
from ranks import run_ranks

import rewriter as rw
from rewriter import api
from rewriter.cli import main
from rewriter.cli.convert import parse_degrees
from rewriter.common.errors import RewriterError
from rewriter.convert import replaced_files
from rewriter.convert import reshard as module
from rewriter.runtime import Context, load

FAMILY = "llama"
IDS = (1, 9)


def rank_logits(group: Any, directory: str) -> torch.Tensor:
    model = load(directory, device="cpu")
    with torch.no_grad():
        result: torch.Tensor = model(zoo.batch(*IDS), torch.arange(IDS[1])[None], Context())
    return result


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / FAMILY
    zoo.save(FAMILY, path)
    return path


@pytest.fixture(scope="module")
def made(source: Path) -> dict[str, Path]:
    """Outputs for two ranks, and for two and four."""
    for name, tp in (("one", 2), ("both", [2, 4])):
        report = api.convert(source, "ladder", out=source.parent / name, tp=tp, options=api.SaveOptions(verify="none"))
    assert {"runtime/tp2/module.py", "runtime/tp4/weights.json"} <= {*report.files}
    return {name: source.parent / name for name in ("one", "both")}


@pytest.fixture
def out(made: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made["one"], tmp_path / "out"))


@pytest.fixture
def both(made: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made["both"], tmp_path / "out"))


def files(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


@pytest.mark.slow
def test_ranks_take_the_module_that_fits_them(made: dict[str, Path]) -> None:
    assert len(list(made["both"].glob("*.safetensors"))) == 1
    expected = run_ranks(rank_logits, 2, str(made["both"]))[0]
    for found in run_ranks(rank_logits, 4, str(made["both"])):
        assert relative_error(found, expected) <= 1e-5
    api.verify(made["both"])


def test_a_module_is_added_and_nothing_else_changes(out: Path) -> None:
    before = files(out)
    checks = api.reshard(out, 4)
    assert checks["real weights: sharded module on 4 ranks = its reference"] <= 1e-4
    after = files(out)
    assert {*after} - {*before} == {"runtime/tp4/module.py", "runtime/tp4/weights.json"}
    assert {name for name in before if before[name] != after[name]} == {"rewrite.json"}
    manifest = json.loads(after["rewrite.json"])
    assert {*manifest["runtime"]} == {"tp2", "tp4"}
    assert manifest["job"] == json.loads(before["rewrite.json"])["job"]
    api.verify(out)


@pytest.mark.parametrize(
    ("tp", "message"),
    [(2, "it has the module of tp2 already"), (3, r"3 ranks|divide|heads"), (1024, r"1024|ranks")],
)
def test_what_cannot_be_added_changes_nothing(tp: int, message: str, out: Path) -> None:
    before = files(out)
    with pytest.raises(RewriterError, match=message):
        api.reshard(out, tp)
    assert files(out) == before


def test_a_fault_changes_nothing(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files(out)
    right = module.references_text

    def swapped(references: Any, checkpoint: Any) -> str:
        table = json.loads(right(references, checkpoint))
        for name, (expression, dim, ranges) in table["parameters"].items():
            table["parameters"][name] = [expression, dim, ranges and ranges[::-1] if "o_proj" in name else ranges]
        return json.dumps(table)

    monkeypatch.setattr(module, "references_text", swapped)
    assert main(["reshard", str(out), "--tp", "4"]) == 3
    assert files(out) == before


def test_bound_recipes_are_for_one_number_of_ranks(source: Path, tmp_path: Path) -> None:
    with pytest.raises(RewriterError, match=r"--tp 2,4: desync-2x is bound to its ranks\. Convert once for each"):
        api.convert(source, "desync-2x", out=tmp_path / "out", tp=[2, 4])
    assert not (tmp_path / "out").exists()
    api.convert(source, "desync-2x", out=tmp_path / "out", tp=2, options=api.SaveOptions(verify="none"))
    with pytest.raises(RewriterError, match="is bound to tp=2"):
        api.reshard(tmp_path / "out", 4)


def test_an_impossible_degree_is_refused_before_anything_is_written(source: Path, tmp_path: Path) -> None:
    with pytest.raises(RewriterError):
        api.convert(source, "ladder", out=tmp_path / "out", tp=[2, 1024])
    assert not list(tmp_path.iterdir())


def test_a_resumed_run_adds_what_is_missing_and_deletes_nothing(
    source: Path, both: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick, resumed = api.SaveOptions(verify="none"), api.SaveOptions(verify="none", resume=True)
    before = files(both)
    api.convert(source, "ladder", out=both, tp=[2, 4], options=resumed)
    assert files(both) == before

    def fail(*_: Any, **__: Any) -> None:
        raise RewriterError("no room")

    monkeypatch.setattr("rewriter.convert.conversion.reshard", fail)
    with pytest.raises(RewriterError, match="no room"):
        api.convert(source, "ladder", out=both, tp=[2, 1], options=resumed)
    assert files(both) == before
    with pytest.raises(RewriterError, match="no room"):
        api.convert(source, "ladder", out=tmp_path / "new", tp=[2, 4], options=quick)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.slow
def test_what_a_killed_run_left_is_replaced(source: Path, both: Path, kept: int) -> None:
    """Killed before the manifest names the second module, and after it, with its scratch directory still there."""
    complete, path = files(both), both / "rewrite.json"
    if not kept:
        manifest = json.loads(path.read_text())
        del manifest["runtime"]["tp4"]
        manifest["files"] = {name: digest for name, digest in manifest["files"].items() if "tp4" not in name}
        path.write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
        (both / "runtime" / "tp4" / "module.py").write_text("half")
    (both / replaced_files.SCRATCH / "view").mkdir(parents=True)
    api.convert(source, "ladder", out=both, tp=[2, 4], options=api.SaveOptions(verify="none", resume=True))
    assert files(both) == complete
    assert not (both / replaced_files.SCRATCH).exists()


def test_two_runs_do_not_add_modules_at_once(out: Path) -> None:
    with replaced_files.scratch_in(out), pytest.raises(RewriterError, match="another run is adding a module there"):
        api.reshard(out, 4, verify="none")


def test_generate_names_the_modules_that_there_are(out: Path) -> None:
    with pytest.raises(RewriterError, match=r"no runtime module for tp4, only tp2\. `rewrite reshard DIR --tp N` adds"):
        api.generate(out, ["text"], tp=4)


def test_one_device_takes_the_options_of_ranks(out: Path) -> None:
    with TestCase().assertLogs("rewriter", "INFO") as logs:
        model = rw.load(out, device="cpu", dtype=torch.bfloat16, compile=True)
    assert next(model.parameters()).dtype == torch.bfloat16
    assert model._compiled_call_impl is not None
    assert "the adapted checkpoint on one device" in "".join(logs.output)


@pytest.mark.parametrize("text", ["", "0", "-1", "two", "2,2", "2,,4", "2;4"])
def test_degrees_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(RewriterError, match="expected a number of ranks, or several different ones"):
        parse_degrees(text)
    assert parse_degrees("2, 4,8") == [2, 4, 8]

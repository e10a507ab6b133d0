"""`rewrite refresh`: outputs of earlier versions get code for the installed ones, and keep their weights."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import emitted
import pytest
import torch
import transformers
from oracles import relative_error
from packaging.version import Version
from repository import TESTS
from safetensors.torch import load_file, save_file

from rewriter import api
from rewriter.cli import main
from rewriter.common.errors import RewriterError, VerificationError
from rewriter.convert import refresh as module
from rewriter.emit.files.output_directory import sha256_of
from rewriter.output.manifest import read_manifest

EARLIER = TESTS / "earlier_outputs"
OUTPUTS = ("llama-ladder-tp2", "qwen3-desync-tp2", "mixtral-ladder")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return copied(OUTPUTS[0], tmp_path)


def copied(name: str, place: Path) -> Path:
    return Path(shutil.copytree(EARLIER / name, place / name))


def state(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()}


def weights(out: Path) -> dict[str, tuple[int, int, bytes]]:
    """Of every file of tensors: which file it is on the disk, when it was written, and what it holds."""
    files = [*out.rglob("*.safetensors"), *out.rglob("*.tensors")]
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns, p.read_bytes()) for p in files}


def require_golden(out: Path) -> None:
    """The checkpoint computes the logits that were stored when it was written, and nothing warns of old names."""
    golden = load_file(out / "verification" / "golden.tensors")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", FutureWarning)
        model = emitted.load(out, dtype=torch.float32)
        ids = golden["input_ids"]
        steps = model.generate(ids, max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True)
        assert relative_error(steps.logits[0][0], golden["logits"]) <= 1e-5
        again = model(steps.sequences).logits[:, ids.shape[1] - 1 : -1]
    assert relative_error(torch.stack(steps.logits, 1), again) <= 1e-5


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.fast("llama-ladder-tp2")
def test_an_earlier_output_is_mended(name: str, tmp_path: Path) -> None:
    out = copied(name, tmp_path)
    if Version(transformers.__version__) >= Version("5.24"):
        with pytest.raises(ImportError, match="is not the one that this file was generated for"):
            emitted.load(out)
    before, kept, manifest = state(out), weights(out), read_manifest(out)
    assert sum(map(len, before.values())) < 200_000
    figures = api.refresh(out, verify="none")
    assert weights(out) == kept
    assert figures["code before was of"].endswith("transformers 5.23.0, python 3.11.7")
    after, now = state(out), read_manifest(out)
    assert {n for n in before if before[n] != after[n]} <= {"README.md", "rewrite.json", "config.json", *_code(before)}
    assert after.keys() == before.keys()
    config, former = json.loads(after["config.json"]), json.loads(before["config.json"])
    modes = config.pop("rewriter_modes", None)  # since vLLM's schedule reads what they mean
    assert config == former
    assert (modes is None) == ("rewriter_pattern" not in former)
    assert now.refreshed == [manifest.versions]
    assert now.versions["transformers"] == transformers.__version__
    assert (now.source, now.recipe, now.job, now.golden) == (
        manifest.source, manifest.recipe, manifest.job, manifest.golden
    )  # fmt: skip
    require_golden(out)
    api.load(out, check=True)  # every listed hash


def _code(files: dict[str, bytes]) -> set[str]:
    return {name for name in files if name.endswith((".py", "weights.json"))}


@pytest.mark.parametrize("name", [OUTPUTS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in OUTPUTS[1:])])
@pytest.mark.slow
def test_what_was_mended_is_verified(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command, in another folder, under a name with spaces and through a link; then its ranks once more."""
    copied(name, tmp_path).rename(tmp_path / "an öutput")
    (tmp_path / "link").symlink_to("an öutput")
    monkeypatch.chdir(tmp_path)
    assert main(["refresh", "link"]) == 0
    found = api.verify(tmp_path / "an öutput")
    assert {"adapted checkpoint = golden logits", "sharded module on 2 ranks = golden logits"} <= found.keys()
    if read_manifest(Path("link")).per_rank is None:
        api.reshard(tmp_path / "link", 1, verify="none")
        assert {*read_manifest(Path("link")).runtime} == {"tp1", "tp2"}
        assert main(["refresh", "link", "--verify", "none"]) == 0
        require_golden(tmp_path / "link")


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An earlier output that was refreshed."""
    out = copied(OUTPUTS[0], tmp_path_factory.mktemp("refreshed"))
    api.refresh(out, verify="none")
    return out


@pytest.mark.slow
def test_a_second_time_it_changes_nothing_but_says_so(once: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(once, tmp_path / "out"))
    api.refresh(out, verify="none")
    before, after = state(once), state(out)
    assert {name for name in before if before[name] != after[name]} == {"rewrite.json"}
    assert len(read_manifest(out).refreshed) == 2


@pytest.mark.slow
def test_edits_of_code_are_kept_beside_it_and_those_of_the_config_in_it(once: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(once, tmp_path / "out"))
    code, config = out / read_manifest(out).adapted.modeling, out / "config.json"
    code.write_text(edited := f"{code.read_text()}\n# mine\n")
    config.write_text(config.read_text().replace('"initializer_range": 0.02', '"initializer_range": 0.03'))
    figures = api.refresh(out, verify="none")
    expected = {"config.json", f"{code.name} (kept as {code.name}.edited)"}
    assert set(figures["not as rewrite.json had them"].split(", ")) == expected
    assert (out / f"{code.name}.edited").read_text() == edited
    assert "# mine" not in code.read_text()
    assert json.loads(config.read_text())["initializer_range"] == 0.03
    require_golden(out)
    assert "not as rewrite.json had them" not in api.refresh(out, verify="none")


def test_what_transformers_saved_elsewhere_has_a_next_step(once: Path, tmp_path: Path) -> None:
    emitted.load(once).save_pretrained(tmp_path / "tuned")
    with pytest.raises(RewriterError, match=r"copy its weights and config\.json over those in a copy of that"):
        api.refresh(tmp_path / "tuned")


def test_other_weights_are_refused_and_nothing_changes(out: Path) -> None:
    """Without golden logits it could not be told; with them, code and weights that do not belong together are found."""
    tensors = load_file(out / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"].neg_()
    old = read_manifest(out).files["model.safetensors"]
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    manifest = (out / "rewrite.json").read_text()
    (out / "rewrite.json").write_text(manifest.replace(old, sha256_of(out / "model.safetensors")))
    before = state(out)
    with pytest.raises(VerificationError, match=r"would compute something else than with 5\.23\.0"):
        api.refresh(out)
    assert state(out) == before
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(("written", "message"), [
    (True, r"would now be wired in another way \(rewriter_delays\)"),
    (False, r"config\.json was changed since it was written: its rewriter_delays is .*, by its recipe "),
])  # fmt: skip
def test_another_wiring_is_refused_and_nothing_changes(written: bool, message: str, out: Path) -> None:
    config = json.loads((out / "config.json").read_text())
    config["rewriter_delays"][-1] = [0, 0]
    (out / "config.json").write_text(json.dumps(config))
    if written:
        manifest = json.loads((out / "rewrite.json").read_text())
        manifest["files"]["config.json"] = sha256_of(out / "config.json")
        (out / "rewrite.json").write_text(json.dumps(manifest))
    before = state(out)
    with pytest.raises(RewriterError, match=message):
        api.refresh(out, verify="none")
    assert state(out) == before


@pytest.mark.slow
def test_other_ranges_of_ranks_are_refused(out: Path) -> None:
    path = out / "runtime" / "tp2" / "weights.json"
    table = json.loads(path.read_text())
    for entry in table["parameters"].values():
        if entry[2] is not None:
            entry[2] = entry[2][::-1]
    path.write_text(json.dumps(table))
    with pytest.raises(RewriterError, match="ranks would read other ranges of the checkpoint"):
        api.refresh(out, verify="none")


def test_files_of_others_are_kept_and_names_of_kinds_may_be_others(out: Path) -> None:
    (out / "README.md").write_text("mine")
    (out / "modeling_rewriter_mine.py").write_text("mine")
    path = out / "config.json"
    path.write_text(path.read_text().replace('"ladder"', '"late"'))
    api.refresh(out, verify="none")
    require_golden(out)
    assert (out / "README.md").read_text() == (out / "modeling_rewriter_mine.py").read_text() == "mine"
    assert (out / "modeling_rewriter_llama.py").read_bytes() != (
        EARLIER / out.name / "modeling_rewriter_llama.py"
    ).read_bytes()


@pytest.mark.parametrize("done", [2])
def test_an_interrupted_run_is_repaired_by_the_next(out: Path, done: int, monkeypatch: pytest.MonkeyPatch) -> None:
    replace, calls = os.replace, []

    def failing(source: Any, target: Any) -> None:
        calls.append(target)
        if len(calls) > done:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(module.os, "replace", failing)
    with pytest.raises(KeyboardInterrupt):
        api.refresh(out, verify="none")
    monkeypatch.undo()
    api.refresh(out, verify="none")
    require_golden(out)
    api.load(out, check=True)


def test_a_file_that_was_edited_is_named(out: Path) -> None:
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    before = state(out)
    with pytest.raises(VerificationError, match=r"config\.json is not as it was written.*put the file back"):
        api.refresh(out)
    assert state(out) == before


@pytest.mark.parametrize("name", ["model.safetensors", "runtime/tp2/weights.json"])
def test_a_missing_file_is_named_where_it_was(name: str, out: Path) -> None:
    (out / name).unlink()
    before = state(out)
    with pytest.raises(RewriterError, match=rf"^{out / name}: .*\. \w+") as found:
        api.refresh(out, verify="none")
    assert ".reshard" not in str(found.value)
    assert state(out) == before


def test_missing_golden_logits_are_named_before_anything_is_traced(out: Path) -> None:
    (file := out / json.loads((out / "rewrite.json").read_text())["golden"]["file"]).unlink()
    before = state(out)
    with pytest.raises(RewriterError, match=rf"^{file}: missing, but the manifest names it"):
        api.refresh(out)
    assert state(out) == before


@pytest.mark.slow
def test_ranks_with_files_of_their_own_keep_them(tmp_path: Path) -> None:
    out, source = copied("mixtral-ladder", tmp_path), emitted.source("llama")
    shutil.rmtree(out)
    api.convert(source, "ladder", out=out, tp=2, options=api.SaveOptions(materialize=True, verify="none"))
    kept = weights(out)
    api.refresh(out, verify="none")
    assert weights(out) == kept
    assert read_manifest(out).runtime["tp2"].ranks


def test_a_folder_that_is_no_output_is_refused(tmp_path: Path) -> None:
    assert main(["refresh", str(tmp_path)]) == 2

"""`rewrite doctor`: what is missing is named, with what it is needed for."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from repository import ROOT

from rewriter.cli import app, main
from rewriter.cli import doctor_report as report
from rewriter.cli.doctor_report import TRIED, examine, supported


def states() -> dict[str, tuple[str, str]]:
    found = examine()
    return {f.name: (f.state, f.value) for f in found.findings}


def works(name: str) -> tuple[str, str]:
    return next((c.works, c.missing) for c in examine().commands if c.name == name)


def test_here_everything_needed_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    out = capsys.readouterr().out
    assert not re.search(r"/home/|/root/|hf_[A-Za-z0-9]{8}", out)
    data = json.loads(out)
    assert data["ok"]
    names = {f["name"] for f in data["findings"]}
    assert names >= {"python", "torch", "transformers", "CPU", "backends", "C++", "temporary files"}
    assert data["commands"][0]["name"] == "MODEL --recipe"
    assert {command["name"] for command in data["commands"]} == {*app.COMMANDS, "MODEL --recipe"} - {
        "convert",
        "doctor",
    }
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "What every command needs is here" in out
    for word in ("torch", "transformers", "works here", "generate"):
        assert word in out


@pytest.mark.parametrize(
    ("package", "version", "state"),
    [
        ("torch", "2.10.0", "missing"), ("torch", "2.16.0", "missing"), ("torch", "2.13.0+cu130", "ok"),
        ("transformers", "5.25.0", "missing"), ("transformers", None, "missing"), ("vllm", None, "note"),
    ],
)  # fmt: skip
def test_a_version_out_of_range_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], package: str, version: str | None, state: str
) -> None:
    right = report._installed
    monkeypatch.setattr(report, "_installed", lambda name: version if name == package else right(name))
    assert states()[package][0] == state
    assert main(["doctor"]) == (2 if state == "missing" else 0)
    if state == "missing":
        assert "Something that every command needs is missing" in capsys.readouterr().out
        [finding] = [f for f in examine().findings if f.name == package]
        assert finding.next.startswith(f"pip install '{package}")
        assert works("generate") == ("no", package)


def test_a_torch_that_cannot_be_imported_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert not examine().ok
    assert works("inspect") == ("no", "import torch")


def test_without_a_compiler_compile_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert states()["C++"] == ("note", "no-such-compiler not found")
    assert works("generate") == ("in part", "decode steps are not compiled without a C++ compiler")
    assert examine().ok


def test_packages_that_commands_need(monkeypatch: pytest.MonkeyPatch) -> None:
    right = report.present
    monkeypatch.setattr(report, "present", lambda name: name not in ("onnxscript", "accelerate") and right(name))
    assert works("export") == ("no", "onnxscript (pip install 'rewriter[onnx]')")
    assert works("adapt") == ("no", "accelerate (pip install 'rewriter[adapt]')")
    assert works("search") == ("yes", "")
    assert works("verify") == ("yes", "")


def test_no_temporary_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(report.tempfile, "gettempdir", lambda: str(tmp_path / "gone"))
    assert states()["temporary files"] == ("missing", f"{tmp_path / 'gone'}: No such file or directory")
    assert main(["doctor", "--json"]) == 2


@pytest.mark.parametrize("gpus", [0, 4])
def test_gpus_are_listed_and_a_driver_that_gives_none_is_told(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    about = SimpleNamespace(name="H100", total_memory=80 << 30, major=9, minor=0)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: about)
    state, value = states()["GPU 3" if gpus else "GPU"]
    assert state == ("ok" if gpus else "note")
    said = "H100, 85.90 GB, capability 9.0" if gpus else "none (torch is built for 13.0, and finds none)"
    assert value.startswith(said)


def test_without_gloo_ranks_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_gloo_available", lambda: False)
    assert states()["backends"][0] == "missing"
    assert not examine().ok


def test_little_shared_memory_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report.shutil, "disk_usage", lambda path: SimpleNamespace(free=64 << 20))
    assert states()["shared memory"] == ("note", "67.11 MB free in /dev/shm")


@pytest.mark.slow
def test_it_is_quick_beside_the_import_of_torch() -> None:
    """Neither transformers nor another slow package is imported."""
    code = "import sys, torch; before = len(sys.modules); from rewriter.cli import main; main(['doctor', '--json']); "
    code += "sys.stderr.write(f'{len(sys.modules) - before} {\"transformers\" in sys.modules}')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    modules, transformers = done.stderr.split()[-2:]
    assert int(modules) < 500
    assert transformers == "False"


def test_what_was_tried_is_supported_and_tested() -> None:
    for package in ("torch", "transformers", "triton"):
        assert all(supported(package).contains(f"{version}.0") for version in TRIED[package])
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for package in ("torch", "transformers", "triton"):
        assert ".".join(pinned[package].split(".")[:2]) in TRIED[package]
    from rewriter.cli import serve_command as command

    assert TRIED["vllm"] == command.TRIED


def test_the_readme_names_the_versions_that_are_supported() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for package in ("torch", "transformers"):
        oldest, newest = re.search(rf"\b{package} ([\d.]+\d) to ([\d.]+\d)", text).groups()  # type: ignore[union-attr]
        major, minor = newest.split(".")
        wanted = [(f"{oldest}.0", True), (f"{newest}.9", True), (f"{major}.{int(minor) + 1}.0", False)]
        wanted.append((f"{major}.{int(oldest.split('.')[1]) - 1}.9", False))
        assert [supported(package).contains(version) for version, _ in wanted] == [is_in for _, is_in in wanted]
    assert f"vLLM {TRIED['vllm'][-1]} was tried" in text
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == ">=3.11"
    assert "Python 3.11 or newer" in text


def test_the_issue_forms_ask_for_it() -> None:
    forms = {
        name: yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text()) for name in ("bug", "model")
    }
    for form in forms.values():
        [asked] = [field for field in form["body"] if field.get("id") == "doctor"]
        assert "rewrite doctor" in asked["attributes"]["label"]
        assert asked["validations"]["required"]
    assert forms["bug"]["body"][0]["id"] == "doctor"

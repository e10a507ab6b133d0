"""Installed without extras: every command works, or says in one line which extra it needs, and is content with that."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import adapted
import fresh_environment
import pytest
from packaging.requirements import Requirement
from repository import ROOT

from rewriter.cli import main
from rewriter.cli.app import COMMANDS
from rewriter.common.packages import EXTRAS

WORK = "import shlex, sys; from rewriter.cli import main; sys.exit(max(main(shlex.split(line)) for line in sys.stdin))"
TRAINING = "--data d.jsonl --set max_steps=1 --length 32 --verify none"
INSTALL = "Install the extra: pip install 'rewriter[{}]'"
REFUSED = {
    f"adapt o {TRAINING} --out h": f"rewrite adapt needs the package accelerate. {INSTALL.format('adapt')}",
    "export o --onnx o.onnx": f"needs the packages onnx, onnxruntime, onnxscript. {INSTALL.format('onnx')}",
    "serve o --engine transformers --dry-run": "fastapi, openai, uvicorn. Install what its server needs (pip install "
    "'rewriter[serve]')",
    "serve o --engine vllm --dry-run": "vLLM is not installed. Install it (pip install vllm)",
}
WHOLE = """
m --recipe ladder --tp 2 --verify full --out o
inspect m
predict m --recipe ladder --tp 2 --html p.html
predict m --recipe ladder --tp 2 --measure --eager
recipes show ladder
fabrics show h100-nvlink
fabrics calibrate --largest 4096 --repetitions 3 --out c.yaml
verify o
diff o --html d.html
bisect o
reshard o --tp 1
refresh o
generate o --prompt def --max-new-tokens 2
coverage llama
search m --tp 2 --calibration t.txt --loss 90% --out s.yaml
doctor
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A small model, data to train on, and text."""
    adapted.write_source(tmp_path / "m", layers=2)
    (tmp_path / "d.jsonl").write_text('{"text": "def x return y z"}\n' * 40, encoding="utf-8")
    (tmp_path / "t.txt").write_text("def x return y\n" * 60, encoding="utf-8")
    return tmp_path


def run(python: Path, place: Path, lines: str) -> subprocess.CompletedProcess[str]:
    """The lines as words of `rewrite`, one after the other, in one process of this Python."""
    settings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), "-c", WORK]
    return subprocess.run(
        command, cwd=place, env=settings, input=lines.strip(), capture_output=True, text=True, timeout=900
    )


def refused(python: Path, place: Path) -> None:
    """Every command that needs more says so in one line, before anything is done."""
    done = run(python, place, "\n".join(REFUSED))
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == len(REFUSED), done.stderr
    assert [line for line, part in zip(said, REFUSED.values(), strict=True) if part not in line] == []
    assert done.returncode == 2
    assert not {"h", "heal.yaml", "heal.search", "o.onnx"} & {path.name for path in place.iterdir()}


@pytest.mark.slow
def test_without_extras_commands_work_or_name_their_extra(place: Path) -> None:
    python, site = fresh_environment.make(place / "bare")
    (site / "rewriter").symlink_to(ROOT / "rewriter")
    done = run(python, place, "m --recipe ladder --verify none --out o")
    assert done.returncode == 0, done.stderr
    refused(python, place)


@pytest.mark.slow
def test_the_wheel_alone_runs_every_command(place: Path) -> None:
    named = {line.split()[0] for line in [*WHOLE.strip().splitlines(), *REFUSED]}
    assert named >= set(COMMANDS)
    python, site = fresh_environment.make(place / "bare")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    for words in (
        ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(place / "dist"), str(ROOT)],
        ["--python", str(python), "install", "--quiet", "--no-deps", "--no-index", "--find-links", str(place / "dist"),
         "rewriter"],
        ["--python", str(python), "check"],  # its requirements are there, and theirs
    ):  # fmt: skip
        done = subprocess.run([*pip, *words], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
    assert not (site / "rewriter").is_symlink()
    assert subprocess.run([python.with_name("rewrite"), "--version"], check=True, cwd=place).returncode == 0
    done = run(python, place, WHOLE)
    assert done.returncode == 0, done.stderr
    refused(python, place)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "lines"),
    [
        ("adapt", f"adapt o {TRAINING} --out h\nadapt o {TRAINING} --lora 2 --method sft --out h2"),
        ("onnx", "export o --onnx o.onnx"),
    ],
)
def test_the_extra_is_enough(extra: str, lines: str, place: Path) -> None:
    python, site = fresh_environment.make(place / "more", extra)
    (site / "rewriter").symlink_to(ROOT / "rewriter")
    done = run(python, place, f"m --recipe ladder --verify none --out o\n{lines}")
    assert done.returncode == 0, done.stderr


def test_the_extras_are_those_that_are_declared() -> None:
    names = {extra: {Requirement(line).name for line in lines} for extra, lines in fresh_environment.EXTRAS.items()}
    assert names["serve"] == {"transformers"}  # with its extra `serving`, which holds them
    for extra in ("adapt", "onnx"):
        assert names[extra] == set(EXTRAS[extra])
    assert "rewriter" in names["dev"]


def test_every_package_that_is_imported_is_declared() -> None:
    """Those of vLLM's environment and of PyTorch for CUDA come with these."""
    allowed = {name.lower() for name in fresh_environment.distributions()} | {"triton", "vllm", "rewriter"}
    allowed |= {name for extra in ("adapt", "onnx") for name in EXTRAS[extra]}
    known, found = packages_distributions(), set()
    for file in (ROOT / "rewriter").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found |= {(name.partition(".")[0], file.name) for name in names}
    missing = [
        (name, file)
        for name, file in found
        if name not in sys.stdlib_module_names and not {n.lower() for n in known.get(name, [name])} & allowed
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ModuleNotFoundError("No module named 'timm'", name="timm.x"), "needs the package timm, .*pip install timm"),
        (ImportError("\nX requires the timm library but it was not found in your environment."), "X requires the timm"),
        (ImportError("cannot import name 'x'", name="rewriter.y"), None),
    ],
)  # fmt: skip
def test_a_package_that_a_model_needs_is_no_fault_of_rewriter(
    error: ImportError, told: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def inspect(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("rewriter.api.inspect", inspect)
    assert main(shlex.split("inspect m")) == (1 if told is None else 2)
    said = capsys.readouterr().err
    assert ("fault of rewriter" in said) is (told is None)
    assert re.search(told or "cannot import", said)

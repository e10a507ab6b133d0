"""docs/howto/add-a-pass.md: its files and commands, as printed, and what an output says without the package."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from page_blocks import blocks
from page_files import page_files
from repository import ROOT, TINY_LLAMA

PAGE = ROOT / "docs/howto/add-a-pass.md"
COMMANDS = {"python": "", "rewrite": "-m rewriter.cli"}
# pip installs into a folder, and asks no index.
PIP = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def project(place: Path) -> dict[str, str]:
    """The files of the page in `place`, and the environment in which its commands run there."""
    for name, text in page_files(PAGE).items():
        (place / name).write_text(text, encoding="utf-8")
    shutil.copytree(TINY_LLAMA, place / "tiny-llama")
    for name, module in COMMANDS.items():
        script = place / "bin" / name
        script.parent.mkdir(exist_ok=True)
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n', encoding="utf-8")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    path = f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return os.environ | PIP | {"PIP_TARGET": str(place / "site"), "PATH": path}


def run(command: str, place: Path, environment: dict[str, str], *folders: Path) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(map(str, (*folders, ROOT)))
    words = ["sh", "-ec", command]
    settings = environment | {"PYTHONPATH": paths}
    return subprocess.run(words, cwd=place, env=settings, capture_output=True, text=True, timeout=600)


def commands() -> list[str]:
    [block] = [block.text for block in blocks(PAGE) if block.language == "bash"]
    return block.splitlines()


def test_the_page_prints_what_a_package_needs() -> None:
    assert set(page_files(PAGE)) == {"rewriter_damp.py", "pyproject.toml", "damp.yaml", "test_damp.py"}
    assert commands()[0] == "python -m pip install ."
    assert PAGE.read_text(encoding="utf-8").count("\n") <= 250


@pytest.mark.slow
def test_the_page_runs_as_printed(tmp_path: Path) -> None:
    environment, said = project(tmp_path), {}
    for command in commands():
        done = run(command, tmp_path, environment, tmp_path / "site")
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        said[command.split()[1]] = done.stdout
    page = PAGE.read_text(encoding="utf-8")
    assert said["recipes"].strip() in page
    assert (tmp_path / "site/rewriter_damp-0.1.dist-info").is_dir()
    assert "| damp (rewriter-damp==0.1) | approximating |" in (tmp_path / "damped/README.md").read_text()
    # With the package the recipe is applied again; without it these commands say what is missing, and others run.
    assert run("rewrite diff damped", tmp_path, environment, tmp_path / "site").returncode == 0
    elsewhere = tmp_path / "elsewhere"  # pip leaves the package's metadata in its own folder
    elsewhere.mkdir()
    out = "../damped"
    for command in (f"refresh {out}", f"diff {out}", f"reshard {out} --tp 1", f"adapt {out} --out h --tokens 64"):
        done = run(f"rewrite {command}", elsewhere, environment)
        assert done.returncode == 2, command
        [message] = re.findall(r"pass 'damp' of this output .*", " ".join(done.stderr.split()))
        assert message.rstrip(".") in page
    done = run(f"rewrite generate {out} --prompt def --max-new-tokens 2", elsewhere, environment)
    assert done.returncode == 0, done.stderr

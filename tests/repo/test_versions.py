"""Emitted checkpoints in other versions of transformers, and theirs in the installed one."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from repository import ROOT
from safetensors.torch import save_file

CHECKPOINTS = 6 + 6  # ladder and desync of every family


@pytest.mark.slow
def test_emitted_checkpoints_run_in_other_versions_of_transformers() -> None:
    """Installs them: without a package index this fails."""
    ran = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/models/versions.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr[-4000:]}"
    assert ran.stdout.count(" ok ") == 6 * CHECKPOINTS, ran.stdout  # to three versions, and back


@pytest.mark.parametrize(
    ("error", "refusal", "good"), [(1e-6, None, True), (1e-3, None, False), (0.0, "transformers 5.17.0 is not", False)]
)
def test_a_difference_is_found(tmp_path: Path, error: float, refusal: str | None, good: bool) -> None:
    name = "llama-ladder"
    for folder, added in (("expected", 0.0), ("results", error)):
        (tmp_path / folder).mkdir()
        refused = {name: refusal} if refusal and folder == "results" else {}
        (tmp_path / folder / "refused.json").write_text(json.dumps(refused))
        if not refused:
            logits = torch.linspace(-1, 1, 12).reshape(1, 3, 4) + added
            save_file({"logits": logits}, tmp_path / folder / f"{name}.safetensors")
    compare = importlib.import_module("benchmarks.models.versions").compare
    assert compare(tmp_path / "expected", tmp_path / "results", "5.23.0", "5.17.0", 1e-5) == (not good)

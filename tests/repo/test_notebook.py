"""The example notebooks run from top to bottom in a fresh kernel."""

from __future__ import annotations

import json
import re
import sys

import nbformat
import pytest
from nbclient import NotebookClient
from repository import ROOT

EXAMPLES = ROOT / "examples"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a notebook of `examples`; returns its HTML outputs and all that it printed."""
    # a kernel of this very Python, whether or not one is installed for the user
    spec = tmp_path / "kernels" / "python3"
    spec.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "Python 3", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # what the notebook writes goes with the test

    def execute(name: str, timeout: int = 120) -> tuple[list[str], str]:
        path = EXAMPLES / name
        notebook = nbformat.read(path, as_version=4)
        assert all(not cell.get("outputs") for cell in notebook.cells), "the notebook is kept without outputs"
        NotebookClient(notebook, timeout=timeout, resources={"metadata": {"path": str(path.parent)}}).execute()
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
        shown = [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]
        return shown, "".join(output.get("text", "") for output in outputs)

    return execute


@pytest.mark.slow
def test_the_notebook_runs_in_a_fresh_kernel(run):
    shown, printed = run("ladder.ipynb")
    assert len(shown) == 2
    assert all("<details" in html for html in shown)
    assert "all_reduce_start" in shown[1]
    assert "ladder            approximating" in printed
    assert "KL 0." in printed
    assert "runtime/tp2/weights.json" in printed
    assert "def read_lines(path):" in printed


@pytest.mark.slow
def test_rewrite_and_look(run):
    shown, printed = run("notebooks/rewrite_and_look.ipynb", 300)
    assert len(shown) == 5  # program, recipe, rewritten program, report, difference
    assert all("<svg" in html for html in shown)
    assert "all-reduce overlapped with computation" not in shown[0]
    assert "all-reduce overlapped with computation" in shown[2]
    assert 0.05 < float(re.search(r"KL\(original, rewritten\): ([\d.]+)", printed)[1]) < 0.5


@pytest.mark.slow
def test_heal(run):
    _, printed = run("notebooks/heal.ipynb", 600)
    losses = {name: float(value) for name, value in re.findall(r"^(.*): ([\d.]+) nats per token$", printed, re.M)}
    before, after = (next(v for k, v in losses.items() if word in k) for word in ("before", "after"))
    assert after < 0.9 * before


@pytest.mark.slow
def test_predict_your_fabric(run):
    _, printed = run("notebooks/predict_your_fabric.ipynb", 600)
    steps = [float(value) for value in re.findall(r"^tensor-parallel +([\d.]+) µs a step", printed, re.M)]
    assert len(steps) == 2
    assert steps[1] > steps[0] + 12 * 15  # 12 all-reduces, each 20 µs later
    assert "fabric: mine" in printed  # the recipe that was found

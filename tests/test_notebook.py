"""The example notebook runs from top to bottom in a fresh kernel."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_notebook_runs_in_a_fresh_kernel(tmp_path, monkeypatch):
    # a kernel of this very Python, whether or not one is installed for the user
    spec = tmp_path / "kernels" / "python3"
    spec.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "Python 3", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # what the notebook writes goes with the test
    notebook = nbformat.read(EXAMPLES / "ladder.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "the notebook is kept without outputs"
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(EXAMPLES)}}).execute()
    shown = [o["data"]["text/html"] for cell in notebook.cells for o in cell.get("outputs", []) if "data" in o]
    assert len(shown) == 2
    assert all("<details" in html for html in shown)
    assert "all_reduce_start" in shown[1]
    printed = "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))
    assert "ladder            approximating" in printed
    assert "KL 0." in printed
    assert "runtime/tp2/weights.json" in printed
    assert "def read_lines(path):" in printed

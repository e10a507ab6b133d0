"""The example notebooks run from top to bottom in a fresh kernel, and give the outputs that they keep."""

from __future__ import annotations

import html
import re
from collections.abc import Callable

import nbformat
import notebooks
import pytest
from repository import ROOT

EXAMPLES = ROOT / "examples"
Run = Callable[[str], tuple[list[str], str]]
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e-\d+)?")


def texts(notebook: nbformat.NotebookNode) -> list[tuple[str, str]]:
    """(kind, text) of all outputs of a notebook."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = [("text", output.text) for output in outputs if "text" in output]
    return printed + [(kind, text) for output in outputs for kind, text in sorted(output.get("data", {}).items())]


def compared(found: nbformat.NotebookNode, kept: nbformat.NotebookNode) -> None:
    """Same words in the same order; numbers may differ by rounding errors of another processor."""
    assert [kind for kind, _ in texts(found)] == [kind for kind, _ in texts(kept)]
    for (_, new), (_, old) in zip(texts(found), texts(kept), strict=True):
        assert NUMBER.sub("#", new) == NUMBER.sub("#", old), "python tools/docs/notebooks.py"
        numbers, expected = ([float(number) for number in NUMBER.findall(text)] for text in (new, old))
        assert numbers == pytest.approx(expected, rel=0.05, abs=0.01), "python tools/docs/notebooks.py"


@pytest.fixture
def run() -> Run:
    """Runs a notebook of `examples`, compares it with its kept outputs, returns its HTML outputs and printed text."""

    def execute(name: str) -> tuple[list[str], str]:
        found = notebooks.executed(EXAMPLES / name)
        compared(found, nbformat.read(EXAMPLES / name, as_version=4))
        shown = texts(found)
        html_outputs = [text for kind, text in shown if kind == "text/html"]
        return html_outputs, "".join(text for kind, text in shown if kind == "text")

    return execute


@pytest.mark.slow
def test_the_notebook_runs_in_a_fresh_kernel(run: Run) -> None:
    shown, printed = run("ladder.ipynb")
    assert len(shown) == 2
    assert all("<details" in html for html in shown)
    assert "all_reduce_start" in shown[1]
    assert "ladder            approximating" in printed
    assert "KL 0." in printed
    assert "runtime/tp2/weights.json" in printed
    assert "def read_lines(path):" in printed


@pytest.mark.slow
def test_rewrite_and_look(run: Run) -> None:
    shown, printed = run("notebooks/rewrite_and_look.ipynb")
    assert len(shown) == 5  # program, recipe, rewritten program, report, difference
    assert all("<svg" in html for index, html in enumerate(shown) if index != 1)
    assert "<td><b>ladder</b></td>" in shown[1]
    assert "all-reduce overlapped with computation" not in shown[0]
    assert "all-reduce overlapped with computation" in shown[2]
    assert 0.05 < float(re.search(r"KL\(original, rewritten\): ([\d.]+)", printed)[1]) < 0.5


@pytest.mark.slow
def test_heal(run: Run) -> None:
    _, printed = run("notebooks/heal.ipynb")
    losses = {name: float(value) for name, value in re.findall(r"^(.*): ([\d.]+) nats per token$", printed, re.M)}
    before, after = (next(v for k, v in losses.items() if word in k) for word in ("before", "after"))
    assert after < 0.9 * before


@pytest.mark.slow
def test_predict_your_fabric(run: Run) -> None:
    _, printed = run("notebooks/predict_your_fabric.ipynb")
    steps = [float(value) for value in re.findall(r"^tensor-parallel +([\d.]+) µs a step", printed, re.M)]
    assert len(steps) == 2
    assert steps[1] > steps[0] + 12 * 15  # 12 all-reduces, each 20 µs later
    assert "fabric: mine" in printed  # the recipe that was found


def test_kept_outputs_name_no_place_of_a_machine_and_no_warning() -> None:
    for path in notebooks.notebooks():
        for _, text in texts(nbformat.read(path, as_version=4)):
            assert set(re.findall(r"/(?:home|root|tmp|work|Users)/\w+", text)) == set(), path
            assert "Warning" not in text, path


def test_pages_of_notebooks_have_every_cell_and_output() -> None:
    pages = notebooks.pages()
    for path in notebooks.notebooks():
        page = pages[f"notebooks/{path.stem}.md"]
        notebook = nbformat.read(path, as_version=4)
        assert all(cell.source in page for cell in notebook.cells), path
        assert all(html.escape(text.rstrip()) in page for kind, text in texts(notebook) if kind == "text"), path
        assert all(text in page for kind, text in texts(notebook) if kind == "text/html"), path


def test_other_words_or_numbers_in_an_output_are_found() -> None:
    path = EXAMPLES / "notebooks/heal.ipynb"
    for old, new in (("48 texts", "58 texts"), ("texts to train", "lines to train")):
        other = nbformat.reads(path.read_text(encoding="utf-8").replace(old, new), as_version=4)
        with pytest.raises(AssertionError):
            compared(other, nbformat.read(path, as_version=4))

"""Runs the notebooks of examples/ and keeps their outputs in them; makes a page of the site from each.

    python tools/docs/notebooks.py            # runs all and writes their outputs: a minute

Temporary folders are written as `work`; warnings and progress bars are left out.
"""

from __future__ import annotations

import html
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"
LONGEST = 300  # characters of the text that stands for an output that has HTML as well


def notebooks() -> list[Path]:
    """All example notebooks."""
    return sorted([*EXAMPLES.glob("*.ipynb"), *EXAMPLES.glob("notebooks/*.ipynb")])


def executed(path: Path, timeout: int = 600) -> Any:
    """The notebook after a run from top to bottom in a fresh kernel of this Python; `timeout`: seconds for a cell."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as scratch:
        # a kernel of this very Python, even if none is installed for the user
        spec = Path(scratch, "kernels/python3")
        spec.mkdir(parents=True)
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        (spec / "kernel.json").write_text(
            json.dumps({"argv": command, "display_name": "Python 3", "language": "python"})
        )
        settings = {"JUPYTER_PATH": scratch, "PYTHONPATH": str(EXAMPLES.parent), "TMPDIR": scratch}
        before = {name: os.environ.get(name) for name in settings}
        os.environ |= settings
        try:
            resources = {"metadata": {"path": str(path.parent)}}
            NotebookClient(notebook, timeout=timeout, resources=resources, record_timing=False).execute()
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs = [output for o in cell.outputs if (output := _kept(o, scratch))]
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def _kept(output: Any, scratch: str) -> Any:
    """An output without this run's paths; None for what is written to stderr."""
    if output.get("name") == "stderr":
        return None
    data = output.get("data", {})
    if "text/html" in data and len(data.get("text/plain", "")) > LONGEST:
        del data["text/plain"]
    for holder, key in ((output, "text"), *((data, kind) for kind in data)):
        if key in holder:
            holder[key] = re.sub(rf"{re.escape(scratch)}/tmp\w+", "work", holder[key])
    return output


def pages() -> dict[str, str]:
    """The notebooks as Markdown, by their places in the site."""
    return {f"notebooks/{path.stem}.md": page(path) for path in notebooks()}


def page(path: Path) -> str:
    """A notebook with the outputs that it keeps, as Markdown."""
    where = path.relative_to(EXAMPLES.parent).as_posix()
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        else:
            parts += [f"````python\n{source}\n````", *map(_shown, cell["outputs"])]
    parts.insert(1, f"Made from `{where}`, with the outputs of its last run.")
    return "\n\n".join(parts) + "\n"


def _shown(output: dict[str, Any]) -> str:
    shown = "".join(output.get("data", {}).get("text/html", ""))
    if not shown:
        text = "".join(output.get("text") or output["data"]["text/plain"])
        shown = f"<pre><code>{html.escape(text.rstrip())}</code></pre>"
    return f'<div class="output" data-search-exclude>\n{shown}\n</div>'


if __name__ == "__main__":
    import nbformat

    for path in notebooks():
        path.write_text(nbformat.writes(executed(path)) + "\n", encoding="utf-8")

"""The README's picture of a terminal, docs/figures/terminal.svg: what commands print on the model that ships.

    python tools/docs/terminal.py

Nothing in it is drawn by hand: the commands run, and their colours become those of the picture.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[2]
FIGURE = ROOT / "docs" / "figures" / "terminal.svg"
WIDTH = 92  # columns
COMMANDS = (
    "rewrite examples/tiny-llama --recipe ladder-upper-half --tp 2 --out ladder",
    "rewrite generate ladder --prompt 'def read_lines(path):' --max-new-tokens 48",
)
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def session() -> list[tuple[str, str]]:
    """Each command with what it prints, as a terminal of `WIDTH` columns gets it. Raises CalledProcessError."""
    settings = {"FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    said = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "examples").symlink_to(ROOT / "examples")
        for line in COMMANDS:
            words = [sys.executable, "-m", "rewriter.cli", *shlex.split(line)[1:]]
            done = subprocess.run(
                words, cwd=folder, env={**os.environ, **settings}, check=True, text=True, timeout=600,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            said.append((line, done.stdout))
    return said


def picture(said: list[tuple[str, str]]) -> str:
    """The commands and what they printed, as an SVG that loads nothing."""
    with open(os.devnull, "w") as nowhere:
        console = Console(
            record=True, width=WIDTH, file=nowhere, force_terminal=True, color_system="truecolor", highlight=False
        )
        for number, (line, printed) in enumerate(said):
            console.print(Text.assemble("\n" * bool(number), ("$ ", "green"), (line, "bold")), soft_wrap=True)
            console.print(Text.from_ansi(printed.rstrip()))
        svg = console.export_svg(title="rewriter", unique_id="terminal")
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family: (Fira Code|arial)[^;]*;", f"font-family: {FONT};", svg)
    # Some renderers drop the spaces that a text begins with.
    svg = svg.replace("<svg ", '<svg xml:space="preserve" ', 1)
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


if __name__ == "__main__":
    FIGURE.write_text(picture(session()), encoding="utf-8")

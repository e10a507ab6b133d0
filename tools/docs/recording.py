"""The README's recording, docs/figures/recording.svg: a model is converted, answers badly, is healed, answers well.

    python tools/docs/recording.py models/smollm2     # runs the commands for half an hour; keeps recording.json
    python tools/docs/recording.py                    # draws recording.json again

Nothing in it is written by hand: the commands run, and their words and colours become those of the picture. Waits
between lines are shortened; the seconds of healing stand in what `rewrite adapt` prints.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[2]
FIGURE, KEPT = ROOT / "docs" / "figures" / "recording.svg", Path(__file__).with_suffix(".json")
WIDTH = 100  # columns
QUESTION = '--message "What is the capital of France?" --max-new-tokens 24'
COMMANDS = (
    "rewrite models/smollm2 --recipe ladder-upper-half --tp 3 --out ladder | tail -4",
    f"rewrite generate ladder {QUESTION}",
    "rewrite adapt ladder --out healed --tokens 393216 | tail -10",
    f"rewrite generate healed {QUESTION}",
)
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
TYPED, COMPUTED, PRINTED = 1.2, 1.0, 0.05  # seconds: before a command, before its output, between two lines
STYLE = """
@keyframes appear { from { opacity: 0 } to { opacity: 1 } }
.terminal-matrix > text { animation: appear 0.05s both }
@media (prefers-reduced-motion: reduce) { .terminal-matrix > text { animation: none } }
"""


def session(model: Path) -> list[tuple[str, str]]:
    """Each command with what it prints to a terminal of `WIDTH` columns. Raises CalledProcessError."""
    settings = {"FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    said = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "models").mkdir()
        (Path(folder) / "models" / "smollm2").symlink_to(model.resolve())
        for line in COMMANDS:
            command = f'set -o pipefail; rewrite() {{ "{sys.executable}" -m rewriter.cli "$@"; }}; {line}'
            done = subprocess.run(
                ["bash", "-c", command], cwd=folder, env={**os.environ, **settings}, check=True, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            said.append((line, done.stdout))
    return said


def picture(said: list[tuple[str, str]]) -> str:
    """The commands and what they printed, as an SVG that loads nothing and whose lines appear one by one."""
    starts, now = [], 0.0
    with open(os.devnull, "w") as nowhere:
        console = Console(
            record=True, width=WIDTH, file=nowhere, force_terminal=True, color_system="truecolor", highlight=False
        )
        for number, (line, printed) in enumerate(said):
            console.print(Text.assemble("\n" * bool(number), ("$ ", "green"), (line, "bold")), soft_wrap=True)
            now += TYPED
            starts += [now] * (1 + bool(number))
            output = Text.from_ansi(printed.strip("\n")).wrap(console, WIDTH)
            for row in output:
                console.print(row, soft_wrap=True)
            now += COMPUTED
            starts += [now + PRINTED * index for index in range(len(output))]
            now += PRINTED * len(output)
        svg = console.export_svg(title="rewriter", unique_id="terminal")
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family: (Fira Code|arial)[^;]*;", f"font-family: {FONT};", svg)
    svg = svg.replace("</style>", f"{STYLE}</style>", 1)

    def delayed(found: re.Match[str]) -> str:
        return f'<text style="animation-delay:{starts[int(found[2])]:.2f}s"{found[1]}'

    svg = re.sub(r'<text([^>]*?clip-path="url\(#terminal-line-(\d+)\)")', delayed, svg)
    # Some renderers drop the spaces that a text begins with.
    svg = svg.replace("<svg ", '<svg xml:space="preserve" ', 1)
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def kept() -> list[tuple[str, str]]:
    """The recorded commands, each with its output."""
    return [(line, printed) for line, printed in json.loads(KEPT.read_text(encoding="utf-8"))]


if __name__ == "__main__":
    if sys.argv[1:]:
        KEPT.write_text(json.dumps(session(Path(sys.argv[1])), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    FIGURE.write_text(picture(kept()), encoding="utf-8")

"""The README's plot, docs/figures/gains.svg: predicted gains by fabric of recipes that heal, with what each costs.

    python -m benchmarks.predict.gains

Gains are read from docs/results/when.md (`python -m benchmarks.predict.when`), losses from the records of healing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from benchmarks.healing import page as healing
from benchmarks.prefill import page as prefill
from rewriter.common.svg import circle, number, path, rectangle, text

ROOT = Path(__file__).parents[2]
WHEN, FIGURE = ROOT / "docs" / "results" / "when.md", ROOT / "docs" / "figures" / "gains.svg"
MODEL, MEASURED = "Llama 3.1 70B", "smollm2"
RECIPES = ("ladder-upper-half", "desync-2x-sum", "ladder-own-partial", "prefill-desync-2x-sum")
PANELS = {  # title: the third column of a table of when.md, and its row
    "decode step, batch 16": ("batch", "16"),
    "one prompt of 1k tokens": ("prompt", "1,024"),
    "one prompt of 8k tokens": ("prompt", "8,192"),
}
LOW, HIGH = -40, 60  # % of the axes
WIDTH, LEFT, TOP, ROW, GAP, RIGHT = 900.0, 268.0, 98.0, 28.0, 24.0, 24.0
ACROSS = (WIDTH - LEFT - RIGHT - 2 * GAP) / 3
LINE = 19.0  # of the legend
SUBTITLE = "0: as fast as vLLM's best exact choice: one-shot all-reduces, fewer GPUs, replicas or pipeline stages."
COSTS = "Loss above the original's, rewritten → healed: SmolLM2-135M-Instruct (4-bit GGUF, dequantized), measured"
NOTE = (
    "* Network times computed. Losses are on text that the original wrote; prefill-…: on text after prompts. "
    "Nobody has measured these gains."
)
OFFSETS = (-4.5, -1.5, 1.5, 4.5)  # of the recipes, so that equal gains are told apart
STYLE = """
text{font-family:system-ui,sans-serif;fill:#4d5766;font-size:12.5px}.bg{fill:#ffffff;stroke:#d5dae1}
.t{font-weight:600;font-size:15px;fill:#1b2028}.b{font-weight:600;fill:#1b2028}.s{font-size:11px}
.c{text-anchor:middle}.e{text-anchor:end}.g{stroke:#e3e7ec;fill:none}.z{stroke:#4d5766;fill:none}
.r0{fill:#1b6ca8}.r1{fill:#c4472b}.r2{fill:#3a8f4d}.r3{fill:none;stroke:#8a4fa3;stroke-width:2}
@media (prefers-color-scheme:dark){text{fill:#aeb7c4}.bg{fill:#171b21;stroke:#363d48}.t,.b{fill:#eceff4}
.g{stroke:#2c333d}.z{stroke:#aeb7c4}.r0{fill:#6db3ea}.r1{fill:#f08a70}.r2{fill:#7cc98e}.r3{stroke:#c59be0}}
"""


def tables(page: str) -> list[list[list[str]]]:
    """The cells of each table of a page, row by row, without quotes of code; the second row is the rule."""
    return [
        [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in block.splitlines()]
        for block in re.findall(r"(?:^\|.*\n?)+", page, re.MULTILINE)
    ]


def gains(page: str) -> dict[str, dict[str, dict[str, int | None]]]:
    """Gains in per cent by panel, fabric and recipe, of the tables of when.md; None where a recipe has none."""
    found: dict[str, dict[str, dict[str, int | None]]] = {}
    for panel, (third, asked) in PANELS.items():
        [(header, _, *rows)] = [table for table in tables(page) if table[0][2] == third]
        for row in rows:
            if (row[0], row[2]) == (MODEL, asked) and row[3] != "does not fit":
                cells = {name: cell for name, cell in zip(header, row, strict=True) if name in RECIPES}
                found.setdefault(panel, {})[row[1]] = {
                    name: None if cell == "—" else int(cell.split()[0]) for name, cell in cells.items()
                }
    return found


def costs() -> dict[str, str]:
    """The cost of each recipe in words, from its longest run on the measured model."""
    return {recipe: _of_prompts(recipe) if recipe.startswith("prefill-") else _of_all(recipe) for recipe in RECIPES}


def _of_all(recipe: str) -> str:
    runs = [run for run in healing.read()["runs"] if (run["model"], run["way"]) == (MEASURED, "defaults")]
    run = max((run for run in runs if run["recipe"] == recipe), key=lambda run: run["tokens"])
    prose = run["perplexity"]
    said = f"+{healing.above(run, 'before'):.0%} → +{healing.above(run, 'after'):.1%} after {run['tokens']:,} tokens"
    said += f"; perplexity of prose {prose['original']:.1f} → {prose['before']:.0f} → {prose['after']:.1f}"
    return said + (f"; bound to {run['tp']} ranks" if run["tp"] else "")


def _of_prompts(recipe: str) -> str:
    runs = [run for run in prefill.RECORD.read()["healing"] if (run["model"], run["recipe"]) == (MEASURED, recipe)]
    run = max(runs, key=lambda run: run["tokens"])
    said = []
    for name, title in (("manuals", "manuals"), ("calibration", "packaged text")):
        losses = run["texts"][name]
        before, after = (losses[when]["loss"] / losses["original"]["loss"] - 1 for when in ("before", "after"))
        said.append(f"{title} {before:+.1%} → {after:+.1%}")
    return f"{', '.join(said)} after {run['tokens']:,} tokens; bound to {run['tp']} ranks"


def picture(found: Mapping[str, Mapping[str, Mapping[str, int | None]]], cost: Mapping[str, str]) -> str:
    """The whole SVG."""
    fabrics = list(dict.fromkeys(fabric for panel in found.values() for fabric in panel))
    bottom = TOP + ROW * len(fabrics)
    legend = bottom + 56
    height = legend + LINE * (len(RECIPES) + 1) + 28
    title = f"Predicted gains of {MODEL} by fabric, for recipes that were healed on a 135M model"
    parts = [
        text(16, 28, title, "t"),
        text(16, 48, SUBTITLE),
    ]  # fmt: skip
    for row, fabric in enumerate(fabrics):
        parts.append(text(LEFT - 12, TOP + ROW * (row + 0.5) + 4, fabric.replace(" (modelled)", " *"), "e"))
    for column, (panel, by_fabric) in enumerate(found.items()):
        parts += _panel(panel, by_fabric, fabrics, LEFT + column * (ACROSS + GAP), bottom)
    parts.append(text(16, legend - 4, COSTS, "b"))
    for index, recipe in enumerate(RECIPES):
        y = legend + LINE * (index + 1)
        parts += [
            circle(24, y - 4, 5, f"r{index}"),
            text(38, y, recipe, "b"),
            text(200, y, cost[recipe]),
        ]
    parts.append(text(16, height - 14, NOTE, "s"))
    ground = rectangle(0.5, 0.5, WIDTH - 1, height - 1, "bg", round=8)
    said = ". ".join(f"{recipe}: {cost[recipe]}" for recipe in RECIPES)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {number(WIDTH)} {number(height)}" role="img">'
        f"<title>{title}</title><desc>{said}.</desc><style>{STYLE}</style>{ground}\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _panel(
    title: str, by_fabric: Mapping[str, Mapping[str, int | None]], fabrics: list[str], x: float, bottom: float
) -> list[str]:
    def place(gain: float) -> float:
        return x + ACROSS * (min(max(gain, LOW), HIGH) - LOW) / (HIGH - LOW)

    parts = [text(x + ACROSS / 2, TOP - 14, title, "b c")]
    for value in range(LOW, HIGH + 1, 20):
        parts.append(path(f"M{number(place(value))} {number(TOP)}V{number(bottom)}", "z" if value == 0 else "g"))
        if value % 40 == 0:
            parts.append(text(place(value), bottom + 16, f"{value:+d} %" if value else "0", "s c"))
    for row, fabric in enumerate(fabrics):
        y = TOP + ROW * (row + 0.5)
        parts.append(path(f"M{number(x)} {number(y)}h{number(ACROSS)}", "g"))
        for index, recipe in enumerate(RECIPES):
            gain = by_fabric.get(fabric, {}).get(recipe)
            if gain is not None:
                parts.append(
                    circle(place(gain), y + OFFSETS[index], 4.5, f"r{index}", f"{recipe}, {fabric}: {gain:+d} %")
                )
    return parts


if __name__ == "__main__":
    FIGURE.write_text(picture(gains(WHEN.read_text(encoding="utf-8")), costs()), encoding="utf-8")

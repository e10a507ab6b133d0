"""The README's picture, docs/figures/decode-step.svg: a decode step as `rewrite predict` simulates it.

    python -m benchmarks.decode.figure

Standard tensor parallelism above, Ladder Residual below: Llama 3.1 70B on 8 GPUs joined by PCIe, 16 sequences of
1,024 + 512 tokens. Two layers are drawn to scale. The picture has a ground of its own, so that it is read on light and
dark pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.predict.backtest_points import traced
from rewriter import api
from rewriter.common.numbers import digits
from rewriter.common.svg import number, path, rectangle, text, ticks
from rewriter.predict.results import Phase, Span
from rewriter.show.timeline import waits, window

FIGURE = Path(__file__).parents[2] / "docs" / "figures" / "decode-step.svg"
TITLES = {"tensor-parallel": "Standard tensor parallelism", "ladder": "Ladder Residual"}
LAYERS = (60, 61)
WIDTH, LEFT, RIGHT = 760.0, 92.0, 20.0
ACROSS = WIDTH - LEFT - RIGHT
LANE, GAP = 26.0, 5.0
STYLE = """
.bg{fill:#ffffff;stroke:#d5dae1}.t{font:600 15px system-ui,sans-serif;fill:#1b2028}.m{font:13px system-ui,sans-serif;
fill:#4d5766}.w{font:12px system-ui,sans-serif;fill:#ffffff;text-anchor:middle}.k{font:12px system-ui,sans-serif;
fill:#12261c;text-anchor:middle}.x{font:600 12px system-ui,sans-serif;fill:#b23a1c;text-anchor:middle}
.e{text-anchor:end}.c{text-anchor:middle}.g{stroke:#d5dae1;fill:none}.a{fill:#3f76bf}.p{fill:#7a5aa8}.h{fill:#8cc0a5}.r{fill:#d1492a}
.i{fill:#fbe3dc;stroke:#d1492a;stroke-dasharray:3 3}
@media (prefers-color-scheme:dark){.bg{fill:#171b21;stroke:#363d48}.t{fill:#eceff4}.m{fill:#aeb7c4}.g{stroke:#363d48}
.i{fill:#3a211b;stroke:#f0724f}.x{fill:#ff9c80}.h{fill:#7fb89b}}
"""


@dataclass(frozen=True)
class Row:
    """One recipe's decode step, and when it is in the two layers, in seconds from the step's start."""

    title: str
    phase: Phase
    start: float
    end: float


def rows() -> list[Row]:
    """The two predictions."""
    program = traced("llama-3.1-70b", "bfloat16")
    compared = api.predict(
        program, list(TITLES), api.Workload(tp=8, batch=16, prompt=1024, generate=512), api.Cluster(fabric="pcie-gen5")
    )
    return [Row(TITLES[p.recipe], p.decode, *window(p.decode, LAYERS)) for p in compared.predictions]


def picture(drawn: list[Row]) -> str:
    """The whole SVG."""
    longest = max(row.end - row.start for row in drawn)
    first, y = drawn[0].phase.seconds, 62.0
    title = "A decode step of Llama 3.1 70B on 8 RTX PRO 6000 over PCIe: 2 of 80 layers"
    parts = [text(LEFT, 24, title, "t"), *_legend(LEFT, 44)]
    for row in drawn:
        faster = f", {first / row.phase.seconds:.2f} × as fast" if row.phase.seconds < first else ""
        waiting = row.phase.exposed_seconds / row.phase.seconds
        words = f"{row.phase.seconds * 1e3:.1f} ms a step, {waiting:.0%} of it waiting for all-reduces{faster}"
        parts += [text(LEFT, y + 16, row.title, "t"), text(LEFT, y + 34, words, "m")]
        parts += _lanes(row, y + 44, ACROSS / longest)
        y += 44 + 2 * (LANE + GAP) + 18
    parts += _axis(longest, y)
    height = y + 52
    note = "16 sequences, bf16. Predicted by `rewrite predict`, not measured."
    parts.append(text(LEFT, height - 14, note, "m"))
    ground = rectangle(0.5, 0.5, WIDTH - 1, height - 1, "bg", round=8)
    said = ". ".join(f"{row.title}: {row.phase.seconds * 1e3:.1f} ms" for row in drawn)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {number(WIDTH)} {number(height)}" role="img">'
        f"<title>{title}</title><desc>{said}.</desc><style>{STYLE}</style>{ground}\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _legend(x: float, y: float) -> list[str]:
    parts = []
    for style, words in (
        ("a", "attention"), ("p", "MLP"), ("h", "all-reduce, hidden"), ("r", "all-reduce, exposed"), ("i", "idle"),
    ):  # fmt: skip
        parts += [rectangle(x, y - 10, 14, 12, style), text(x + 20, y, words, "m")]
        x += 42 + 6.9 * len(words)
    return parts


def _lanes(row: Row, top: float, per_second: float) -> list[str]:
    """Two lanes of boxes: what the GPU computes, and what travels."""

    def place(a: float, b: float) -> tuple[float, float]:
        low, high = max(a, row.start), min(b, row.end)
        return LEFT + (low - row.start) * per_second, max(high - low, 0.0) * per_second

    parts = [text(LEFT - 10, top + 17, "compute", "m e"), text(LEFT - 10, top + LANE + GAP + 17, "network", "m e")]
    for name, a, b in _blocks(row):
        x, width = place(a, b)
        parts.append(rectangle(x, top, width, LANE, "a" if name == "attention" else "p", f"{name}, {_micro(b - a)}"))
        if width > 7 * len(name):
            parts.append(text(x + width / 2, top + 17, name, "w"))
    idle = [(a, b) for a, b in waits(row.phase) if b > row.start and a < row.end]
    for a, b in idle:
        x, width = place(a, b)
        parts.append(rectangle(x, top + 0.5, width, LANE - 1, "i", f"waits for an all-reduce, {_micro(b - a)}"))
        if width > 30:
            parts.append(text(x + width / 2, top + 17, "idle", "x"))
    below = top + LANE + GAP
    for span in (s for s in row.phase.spans if s.lane == "communication" and s.end > row.start and s.start < row.end):
        x, width = place(span.start, span.end)
        parts.append(rectangle(x, below, width, LANE, "h", f"all-reduce, {_micro(span.seconds)}"))
        for a, b in idle:
            if a < span.end and b > span.start:
                parts.append(rectangle(*_box(place(max(a, span.start), min(b, span.end)), below), "r"))
        exposed = sum(max(0.0, min(b, span.end) - max(a, span.start)) for a, b in idle)
        if width > 70:
            parts.append(text(x + width / 2, below + 17, "all-reduce", "w" if exposed > span.seconds / 2 else "k"))
    return parts


def _box(place: tuple[float, float], y: float) -> tuple[float, float, float, float]:
    return place[0], y, place[1], LANE


def _blocks(row: Row) -> list[tuple[str, float, float]]:
    """Kernels of the two layers joined to blocks: what runs on end in one block, of one layer."""
    found: list[tuple[str, int | None, float, float]] = []
    for span in row.phase.spans:
        if span.lane != "compute" or span.exposed or span.end <= row.start or span.start >= row.end:
            continue
        name = _block(span)
        if found and found[-1][:2] == (name, span.layer) and span.start - found[-1][3] < 1e-9:
            found[-1] = (*found[-1][:3], span.end)
        else:
            found.append((name, span.layer, span.start, span.end))
    return [(name, a, b) for name, _, a, b in found]


def _block(span: Span) -> str:
    """A norm belongs to the block that it stands before."""
    return "MLP" if "mlp" in span.name or "post_attention" in span.name else "attention"


def _axis(seconds: float, y: float) -> list[str]:
    parts = [path(f"M{number(LEFT)} {number(y)}h{number(ACROSS)}", "g")]
    for value in ticks(0, seconds * 1e6):
        x = LEFT + ACROSS * value / (seconds * 1e6)
        parts += [path(f"M{number(x)} {number(y)}v5", "g"), text(x, y + 18, f"{value:g}", "m c")]
    return [*parts, text(LEFT - 10, y + 18, "µs", "m e")]


def _micro(seconds: float) -> str:
    return f"{digits(seconds * 1e6)} µs"


if __name__ == "__main__":
    FIGURE.write_text(picture(rows()), encoding="utf-8")

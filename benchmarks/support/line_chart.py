"""Line charts as SVG, written by hand: no dependency, and the same bytes for the same figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from rewriter.common.svg import ticks

WIDTH, HEIGHT = 720, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 230, 34, 48  # margins; the legend is in the right one
COLOURS = ("#444444", "#1b6ca8", "#c4472b", "#3a8f4d", "#8a4fa3", "#b8860b", "#00838f", "#ad1457", "#6d4c41")
DARK = ("#c9d0da", "#6db3ea", "#f08a70", "#7cc98e", "#c59be0", "#e0b64a", "#4fc3cf", "#f0779f", "#bb9a8e")

Points = Sequence[tuple[float, float]]


def line_chart(title: str, x_label: str, y_label: str, lines: Mapping[str, Points]) -> str:
    """An SVG of `lines` by name, each of (x, y) in rising x above 0. The x axis is logarithmic; y begins at 0."""
    points = [point for line in lines.values() for point in line]
    if not points:
        raise ValueError(f"{title}: no points to draw")
    left, right = (math.log10(bound(x for x, _ in points)) for bound in (min, max))
    right = max(right, left + 0.1)
    low, high = 0.0, max(max(y for _, y in points), 1e-9)

    def place(x: float, y: float) -> str:
        across = LEFT + (WIDTH - LEFT - RIGHT) * (math.log10(x) - left) / (right - left)
        return f"{across:.1f},{TOP + (HEIGHT - TOP - BOTTOM) * (high - y) / (high - low):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">',
        f"<title>{escape(title)}</title><style>{_style()}</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" class="bg"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
        f'<text x="{LEFT}" y="{HEIGHT - 10}">{escape(x_label)}</text>',
        f'<text transform="translate(14 {HEIGHT - BOTTOM}) rotate(-90)">{escape(y_label)}</text>',
    ]
    for value in ticks(low, high):
        _, y = place(10**left, value).split(",")
        x = str(LEFT)
        parts.append(f'<path d="M{x} {y}H{WIDTH - RIGHT}" class="g"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{float(y) + 4:.1f}" class="e">{value:g}</text>')
    for value in (n * 10**power for power in range(math.floor(left), math.ceil(right)) for n in (1, 2, 5)):
        if left <= math.log10(value) <= right:
            x, _ = place(value, low).split(",")
            parts.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 16}" class="c">{value:,}</text>')
    for index, (name, line) in enumerate(lines.items()):
        colour = f"s{index % len(COLOURS)}"
        dashes = ' stroke-dasharray="5 3"' if index >= len(COLOURS) else ""
        joined = " ".join(place(x, y) for x, y in line)
        parts.append(f'<polyline points="{joined}" class="l {colour}"{dashes}/>')
        parts += [
            f'<circle cx="{x}" cy="{y}" r="2" class="p {colour}"/>' for x, y in (p.split(",") for p in joined.split())
        ]
        y = TOP + 16 * index
        parts.append(f'<path d="M{WIDTH - RIGHT + 10} {y}h18" class="l {colour}"{dashes}/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 34}" y="{y + 4}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _style() -> str:
    """CSS for light and dark pages."""

    def lines(colours: Sequence[str]) -> str:
        return "".join(f".s{index}{{--k:{colour}}}" for index, colour in enumerate(colours))

    return (
        "text{font:12px system-ui,sans-serif;fill:#444}.bg{fill:#fff}.g{stroke:#ddd}.e{text-anchor:end}"
        f".c{{text-anchor:middle}}.l{{fill:none;stroke:var(--k);stroke-width:1.8}}.p{{fill:var(--k)}}{lines(COLOURS)}"
        f"@media(prefers-color-scheme:dark){{text{{fill:#aeb7c4}}.bg{{fill:#171b21}}.g{{stroke:#2c333d}}{lines(DARK)}}}"
    )

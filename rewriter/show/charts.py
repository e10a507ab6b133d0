"""Plots of pages: latency against throughput, by recipe. Colours are CSS classes of
`base.html.j2`, which follow the reader's light or dark page and stay apart for colour-blind readers (Okabe and Ito's
palette, adapted to each ground)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log

from rewriter.common.numbers import digits, duration
from rewriter.common.svg import log_ticks, number, path, svg, text
from rewriter.predict.results import PredictedPoint

WIDTH, HEIGHT, TOP, BOTTOM = 1000.0, 460.0, 16.0, 46.0
LEGEND = 17.0  # height of a line
SERIES = 8  # colours --s0 to --s7
# Outlines around a point, by number of ranks in rising order: circle, square, triangle, diamond, triangle down.
SHAPES = (
    "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0", "m-3.5-3.5h7v7h-7z", "m0-4.5l4.5 8h-9z", "m0-5l5 5-5 5-5-5z",
    "m0 4.5l4.5-8h-9z",
)  # fmt: skip


@dataclass(frozen=True)
class Plot:
    """Places of values in a plot whose right margin is `right` wide. `across` and `up` are from 0 to 1."""

    right: float
    across: Callable[[float], float]
    up: Callable[[float], float]
    left: float = 76.0

    def x(self, value: float) -> float:
        return self.left + (WIDTH - self.left - self.right) * self.across(value)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * self.up(value)

    def at(self, x: float, y: float) -> str:
        return f"{number(self.x(x))} {number(self.y(y))}"

    def vertical(self, value: float, style: str) -> str:
        return path(f"M{number(self.x(value))} {number(TOP)}V{number(HEIGHT - BOTTOM)}", style)

    def axes(self, xs: Mapping[float, str], ys: Mapping[float, str], below: str) -> list[str]:
        """Grid lines with their labels, and the words below the plot."""
        parts = []
        for value, label in xs.items():
            parts += [self.vertical(value, "g"), text(self.x(value), HEIGHT - BOTTOM + 16, label, "m c")]
        for value, label in ys.items():
            parts.append(path(f"M{number(self.left)} {number(self.y(value))}H{number(WIDTH - self.right)}", "g"))
            parts.append(text(self.left - 8, self.y(value) + 4, label, "m e"))
        return [*parts, text((self.left + WIDTH - self.right) / 2, HEIGHT - 8, below, "m c")]


def pareto(points_of: Mapping[str, Sequence[PredictedPoint]]) -> str:
    """Time per token of a user against tokens per second of a GPU, over batches and TP degrees: a front per recipe;
    empty without points. Both axes are logarithmic. Hollow points do not fit in memory."""
    points = [point for line in points_of.values() for point in line]
    if not points:
        return ""
    xs, ys = [q.seconds_per_token for q in points], [q.tokens_per_second_per_gpu for q in points]
    (left, right), (low, high) = ((min(values) / 1.15, max(values) * 1.15) for values in (xs, ys))
    plot = Plot(230.0, lambda x: log(x / left) / log(right / left), lambda y: log(y / low) / log(high / low))
    parts = plot.axes(
        {value: _tick(duration(value)) for value in log_ticks(left, right)},
        {value: _tick(digits(value)) for value in log_ticks(low, high)},
        "time per token of one sequence: a decode step (less is better)",
    )
    turned = f'<text transform="translate(16 {number((TOP + HEIGHT - BOTTOM) / 2)}) rotate(-90)" class="m c">'
    parts.append(f"{turned}tokens per second and GPU (more is better)</text>")
    degrees = sorted({q.ranks for q in points})
    for index, line in enumerate(points_of.values()):
        front = sorted((q for q in line if q.front), key=lambda q: q.seconds_per_token)
        if len(front) > 1:
            data = "L".join(plot.at(q.seconds_per_token, q.tokens_per_second_per_gpu) for q in front)
            parts.append(path(f"M{data}", f"pl {_look(index)}"))
    for index, (recipe, line) in enumerate(points_of.items()):
        for q in line:
            ranks = f"tp {q.tp}" + (f" × sp {q.sp}" if q.sp > 1 else "")
            said = f"{recipe}, {ranks}, batch {q.batch}: {duration(q.seconds_per_token)} per token, "
            said += f"{digits(q.tokens_per_second_per_gpu)} tokens/s per GPU" + ("" if q.fits else ", does not fit")
            shape = SHAPES[degrees.index(q.ranks) % len(SHAPES)]
            look = f"pp s{index % SERIES}{'' if q.front else ' o'}{'' if q.fits else ' h'}"
            parts.append(path(f"M{plot.at(q.seconds_per_token, q.tokens_per_second_per_gpu)}{shape}", look, said))
    legend = [
        ("h20", f"pl {_look(i)}", name if len(name) <= 26 else f"{name[:25]}…", "") for i, name in enumerate(points_of)
    ]
    legend += [("", "", "", "")]
    legend += [
        (f"m10 0{SHAPES[i % len(SHAPES)]}", "pk", f"{degree} GPU{'s'[: degree > 1]}", "m")
        for i, degree in enumerate(degrees)
    ]
    legend += [(f"m10 0{SHAPES[0]}", "pk h", "hollow: does not fit", "m")]
    for index, (shape, look, label, style) in enumerate(legend):
        x, y = WIDTH - plot.right + 24, TOP + 12 + LEGEND * index
        if label:
            parts += [path(f"M{number(x)} {number(y - 4)}{shape}", look), text(x + 28, y, label, style)]
    said = "Seconds of a decode step against tokens per second and GPU; the table below has the same points."
    height = max(HEIGHT, TOP + 30 + LEGEND * len(legend))
    return svg(WIDTH, height, "Latency against use of a GPU", said, "", parts)


def _look(index: int) -> str:
    """Colours return, dashed, after the last."""
    return f"s{index % SERIES}{' d' if index >= SERIES else ''}"


def _tick(label: str) -> str:
    """ "5.00 ms" as "5 ms"."""
    amount, _, unit = label.partition(" ")
    short = amount.rstrip("0").rstrip(".") if "." in amount else amount
    return f"{short} {unit}".strip()

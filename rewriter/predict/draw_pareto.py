"""What a user waits for a token against what a GPU earns, over batches and TP degrees: a front per recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import log

from rewriter.common.numbers import digits, duration
from rewriter.predict.results import PredictedPoint
from rewriter.predict.svg import SERIES, drawing, log_ticks, number, path, text

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 1000.0, 460.0, 76.0, 230.0, 16.0, 46.0
LEGEND = 17.0
# Outlines around a point, by number of ranks in rising order: circle, square, triangle, diamond, triangle down.
SHAPES = (
    "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0", "m-3.5-3.5h7v7h-7z", "m0-4.5l4.5 8h-9z", "m0-5l5 5-5 5-5-5z",
    "m0 4.5l4.5-8h-9z",
)  # fmt: skip


def pareto(name: str, found: Mapping[str, Sequence[PredictedPoint]]) -> str:
    """The drawing; empty without points. Both axes are logarithmic. Hollow points do not fit in memory."""
    points = [point for line in found.values() for point in line]
    if not points:
        return ""
    xs, ys = [q.seconds_per_token for q in points], [q.tokens_per_second_per_gpu for q in points]
    place = _PlotPlace(min(xs) / 1.15, max(xs) * 1.15, min(ys) / 1.15, max(ys) * 1.15)
    degrees = sorted({q.ranks for q in points})
    height = max(HEIGHT, TOP + 30 + LEGEND * (len(found) + len(degrees) + 3))
    parts = _axes(place)
    for index, line in enumerate(found.values()):
        front = sorted((q for q in line if q.front), key=lambda q: q.seconds_per_token)
        if len(front) > 1:
            data = "L".join(place.of(q) for q in front)
            parts.append(path(f"M{data}", f"pl {_look(index)}"))
    for index, (recipe, line) in enumerate(found.items()):
        parts += [_point(q, recipe, f"s{index % SERIES}", place, degrees) for q in line]
    x = WIDTH - RIGHT + 24
    for index, recipe in enumerate(found):
        y = TOP + 12 + LEGEND * index
        parts.append(path(f"M{number(x)} {number(y - 4)}h20", f"pl {_look(index)}"))
        parts.append(text(x + 28, y, recipe if len(recipe) <= 26 else f"{recipe[:25]}…"))
    for index, degree in enumerate(degrees):
        y = TOP + 12 + LEGEND * (len(found) + 1 + index)
        parts.append(path(f"M{number(x + 10)} {number(y - 4)}{SHAPES[index % len(SHAPES)]}", "pk"))
        parts.append(text(x + 28, y, f"{degree} GPU{'s'[: degree > 1]}", "m"))
    y = TOP + 12 + LEGEND * (len(found) + 1 + len(degrees))
    parts.append(path(f"M{number(x + 10)} {number(y - 4)}{SHAPES[0]}", "pk h"))
    parts.append(text(x + 28, y, "hollow: does not fit", "m"))
    words = "Seconds of a decode step against tokens per second and GPU; the table below has the same points."
    return drawing(name, WIDTH, height, "Latency against use of a GPU", words, parts)


@dataclass(frozen=True)
class _PlotPlace:
    left: float
    right: float
    low: float
    high: float

    def of(self, q: PredictedPoint) -> str:
        return f"{number(self.x(q.seconds_per_token))} {number(self.y(q.tokens_per_second_per_gpu))}"

    def x(self, seconds: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (log(seconds / self.left) / log(self.right / self.left))

    def y(self, tokens: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (log(tokens / self.low) / log(self.high / self.low))


def _look(index: int) -> str:
    """Colours return, dashed, after the last."""
    return f"s{index % SERIES}{' d' if index >= SERIES else ''}"


def _axes(place: _PlotPlace) -> list[str]:
    parts = []
    for value in log_ticks(place.left, place.right):
        x = place.x(value)
        parts.append(path(f"M{number(x)} {number(TOP)}V{number(HEIGHT - BOTTOM)}", "g"))
        parts.append(text(x, HEIGHT - BOTTOM + 16, _tick(duration(value)), "m c"))
    for value in log_ticks(place.low, place.high):
        y = place.y(value)
        parts.append(path(f"M{number(LEFT)} {number(y)}H{number(WIDTH - RIGHT)}", "g"))
        parts.append(text(LEFT - 8, y + 4, _tick(digits(value)), "m e"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(text(middle, HEIGHT - 8, "time per token of one sequence: a decode step (less is better)", "m c"))
    turned = f'<text transform="translate(16 {number((TOP + HEIGHT - BOTTOM) / 2)}) rotate(-90)" class="m c">'
    parts.append(f"{turned}tokens per second and GPU (more is better)</text>")
    return parts


def _tick(words: str) -> str:
    """ "5.00 ms" as "5 ms"."""
    amount, _, unit = words.partition(" ")
    short = amount.rstrip("0").rstrip(".") if "." in amount else amount
    return f"{short} {unit}".strip()


def _point(q: PredictedPoint, recipe: str, colour: str, place: _PlotPlace, degrees: Sequence[int]) -> str:
    ranks = f"tp {q.tp}" + (f" × sp {q.sp}" if q.sp > 1 else "")
    words = f"{recipe}, {ranks}, batch {q.batch}: {duration(q.seconds_per_token)} per token, "
    words += f"{digits(q.tokens_per_second_per_gpu)} tokens/s per GPU" + ("" if q.fits else ", does not fit")
    shape = SHAPES[degrees.index(q.ranks) % len(SHAPES)]
    look = f"pp {colour}{'' if q.front else ' o'}{'' if q.fits else ' h'}"
    return f'<path d="M{place.of(q)}{shape}" class="{look}"><title>{escape(words)}</title></path>'

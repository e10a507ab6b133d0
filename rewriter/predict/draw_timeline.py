"""The timeline of one forward pass: all of it as two thin lanes, and below a few layers enlarged, with their names.

All drawings of a page share one scale, above and below, so that lengths compare between recipes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rewriter.common.numbers import digits, duration
from rewriter.predict.results import Phase, Span
from rewriter.predict.svg import drawing, number, path, rectangle, strokes, text, ticks

WIDTH, LEFT, RIGHT = 1000.0, 104.0, 12.0
LANE, ZOOMED = 14.0, 24.0  # heights
ACROSS = WIDTH - LEFT - RIGHT
LETTER = 5.6  # the width of one, about
ENLARGED = 2  # layers


@dataclass(frozen=True)
class Scale:
    """What all drawings of a phase share. `seconds`: of the longest pass. `layers`: those enlarged, none where the
    model has no layers; `window`: seconds of the longest stretch of them. `streams`: communication lanes."""

    seconds: float
    layers: tuple[int, ...]
    window: float
    streams: int


def scale(phases: Sequence[Phase]) -> Scale:
    """The common scale of some passes of one model. Layers at three quarters of the depth are enlarged: recipes that
    leave lower layers as they were have changed these."""
    layers = sorted({s.layer for phase in phases for s in phase.spans if s.layer is not None and s.layer >= 0})
    first = min(3 * len(layers) // 4, max(0, len(layers) - ENLARGED))
    chosen = tuple(layers[first : first + ENLARGED])
    windows = [end - start for start, end in (window(phase, chosen) for phase in phases)]
    streams = [s.stream for phase in phases for s in phase.spans if s.lane == "communication"]
    return Scale(max(phase.seconds for phase in phases), chosen, max(windows), max(streams, default=0) + 1)


def window(phase: Phase, layers: Sequence[int]) -> tuple[float, float]:
    """When the compute stream is in these layers; the whole pass where it never is."""
    inside = [s for s in phase.spans if s.lane == "compute" and s.layer in layers]
    if not inside:
        return 0.0, phase.seconds
    return min(s.start for s in inside), max(s.end for s in inside)


def timeline(name: str, title: str, phase: Phase, common: Scale) -> str:
    """The drawing. `name`: unique in the page; `title`: the recipe and the pass."""
    unit, word = (1e-3, "ms") if common.seconds >= 1e-3 else (1e-6, "µs")
    streams = range(common.streams)
    rows = ["compute", *(("communication",) if len(streams) == 1 else (f"comm. stream {s}" for s in streams))]
    parts, y = [], 18.0  # below the axis
    per_second = ACROSS / common.seconds
    low, high = window(phase, common.layers)
    bottom = y + len(rows) * (LANE + 3)
    for value in ticks(0, common.seconds / unit):
        x = LEFT + value * unit * per_second
        parts.append(path(f"M{number(x)} 14V{number(bottom)}", "g"))
        parts.append(text(x, 10, f"{value:g} {word}" if value else "0", f"m {'e' if x > WIDTH - 30 else 'c'}"))
    for row, label in enumerate(rows):
        top = y + row * (LANE + 3)
        parts.append(text(LEFT - 8, top + LANE - 3, label, "m e"))
        parts += _lane(phase, row, top + LANE / 2, per_second)
    if not common.layers or not common.window:
        return drawing(name, WIDTH, bottom + 2, title, _told(phase), parts)
    x0, x1 = LEFT + low * per_second, LEFT + high * per_second
    below = bottom + 18
    width = (high - low) * ACROSS / common.window
    frame = f"M{number(x0)} {number(y - 2)}H{number(x1)}V{number(bottom)}H{number(x0)}z"
    funnel = f"M{number(x0)} {number(bottom)}L{number(LEFT)} {number(below)}"
    funnel += f"M{number(x1)} {number(bottom)}L{number(LEFT + width)} {number(below)}"
    parts.append(path(frame + funnel, "r"))
    parts += _enlarged(phase, common, rows, below + 2)
    return drawing(name, WIDTH, below + 4 + len(rows) * (ZOOMED + 4), title, _told(phase), parts)


def _told(phase: Phase) -> str:
    return (
        f"{duration(phase.seconds)}: computing {duration(phase.compute_seconds)}, waiting for communication "
        f"{duration(phase.exposed_seconds)}, for launches {duration(phase.host_seconds)}."
    )


def _lane(phase: Phase, row: int, middle: float, per_second: float) -> list[str]:
    """One thin lane of the whole pass: what is hidden and what is exposed, each one path."""
    if row == 0:
        plain, marked = compute(phase), waits(phase)
        style = "tc"
    else:
        sent = [s for s in phase.spans if s.lane == "communication" and s.stream == row - 1]
        plain, marked = [(s.start, s.end) for s in sent], _cut(sent, waits(phase))
        style = "th"
    found = []
    for intervals, look in ((plain, style), (marked, "tw" if row == 0 else "te")):
        if intervals:
            places = [(LEFT + a * per_second, LEFT + b * per_second) for a, b in intervals]
            found.append(path(strokes(places, middle), look))
    return found


def compute(phase: Phase) -> list[tuple[float, float]]:
    """Stretches in which the compute stream works."""
    return [(s.start, s.end) for s in phase.spans if s.lane == "compute" and not s.exposed]


def waits(phase: Phase) -> list[tuple[float, float]]:
    """Stretches in which it stands idle for communication."""
    return [(s.start, s.end) for s in phase.spans if s.lane == "compute" and s.exposed]


def _cut(spans: Sequence[Span], within: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The parts of exposed spans that lie in these stretches; both are in order of time."""
    found, first = [], 0
    for s in spans:
        while first < len(within) and within[first][1] <= s.start:
            first += 1
        place = first
        while s.exposed and place < len(within) and within[place][0] < s.end:
            found.append((max(s.start, within[place][0]), min(s.end, within[place][1])))
            place += 1
    return found


def _enlarged(phase: Phase, common: Scale, rows: Sequence[str], top: float) -> list[str]:
    """The enlarged layers: a box per span, named where it is wide enough."""
    low, high = window(phase, common.layers)
    per_second = ACROSS / common.window

    def place(a: float, b: float) -> tuple[float, float]:
        left = LEFT + (max(a, low) - low) * per_second
        return left, max((min(b, high) - max(a, low)) * per_second, 0.4)

    parts = []
    for row, _ in enumerate(rows):
        y = top + row * (ZOOMED + 4)
        if row == 0:
            parts.append(text(LEFT - 8, y + ZOOMED / 2 + 4, named(common.layers), "m e"))
        parts.append(path(f"M{number(LEFT)} {number(y + ZOOMED)}h{number((high - low) * per_second)}", "g"))
    for s in shown(phase, common):
        row = 0 if s.lane == "compute" else 1 + s.stream
        y = top + row * (ZOOMED + 4)
        x, width = place(s.start, s.end)
        words = f"{label_of(s)}, {duration(s.seconds)}"
        if s.lane == "compute":
            parts.append(rectangle(x, y, width, ZOOMED, "zw" if s.exposed else "zc", words))
        else:
            parts.append(rectangle(x, y, width, ZOOMED, "zh", words))
            for a, b in _cut([s], waits(phase)):
                if b > low and a < high:
                    parts.append(rectangle(*_at(place(a, b), y), "ze", f"{words}, of it exposed {duration(b - a)}"))
        parts += _written(s, x, y, width, _on_exposed(s, phase))
    return parts


def named(layers: Sequence[int]) -> str:
    """ "layers 24, 25"."""
    return f"layer{'s'[: len(layers) > 1]} {', '.join(map(str, layers))}"


def _at(place: tuple[float, float], y: float) -> tuple[float, float, float, float]:
    return place[0], y, place[1], ZOOMED


def _on_exposed(span: Span, phase: Phase) -> bool:
    """Whether the middle of a communication, where its name stands, is exposed."""
    middle = (span.start + span.end) / 2
    return any(a <= middle <= b for a, b in _cut([span], waits(phase)))


def _written(span: Span, x: float, y: float, width: float, on_exposed: bool) -> list[str]:
    """The span's name and its duration, if there is room for one of them."""
    if span.exposed and span.lane == "compute":
        return []
    name, time = label_of(span), f"{digits(span.seconds * 1e6)} µs"
    for words in (f"{name} · {time}", name, name.split()[0], name.rpartition(".")[2], time):
        if len(words) * LETTER + 6 <= width:
            dark = span.lane == "compute" or on_exposed
            return [text(x + width / 2, y + ZOOMED / 2 + 4, words, f"zt c{'' if dark else ' k'}")]
    return []


def shown(phase: Phase, common: Scale) -> list[Span]:
    """The spans of the enlarged layers, by start; communication of layers before that still runs is among them."""
    low, high = window(phase, common.layers)
    return [s for s in phase.spans if s.start < high and s.end > low]


def label_of(span: Span) -> str:
    """A span's name without the path to its layer: "mlp.down_proj", "all-reduce mlp" ("all-reduce 12 mlp" of another
    layer is named by its path)."""
    if span.layer is None:
        return span.name
    return re.sub(rf"(?:[\w.]*\.)?(?:layers|h|blocks?)\.{span.layer}\.", "", span.name)

"""The timeline of one forward pass: all of it as two thin rows, and below a few layers enlarged, with their names.

All drawings of a page share one scale, above and below, so that lengths compare between recipes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rewriter.common.numbers import digits, duration
from rewriter.common.svg import number, path, rectangle, strokes, svg, text, ticks
from rewriter.predict.results import Phase, Span

WIDTH, LEFT, RIGHT = 1000.0, 104.0, 12.0
LANE, ZOOMED = 14.0, 24.0  # heights
ACROSS = WIDTH - LEFT - RIGHT
LETTER = 5.6  # the width of one, about
ENLARGED = 2  # layers


@dataclass(frozen=True)
class Scale:
    """The scale of all drawings of a phase. `seconds`: of the longest pass. `layers`: those enlarged, none where the
    model has no layers; `window`: seconds of the longest stretch of them. `streams`: rows of communication."""

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
    """Begin and end of the compute stream's work in these layers; the whole pass where it never is."""
    inside = [s for s in phase.spans if s.lane == "compute" and s.layer in layers]
    if not inside:
        return 0.0, phase.seconds
    return min(s.start for s in inside), max(s.end for s in inside)


def timeline(title: str, phase: Phase, common: Scale) -> str:
    """The drawing. `title`: the recipe and the pass."""
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
        return svg(WIDTH, bottom + 2, title, _summary(phase), "", parts)
    x0, x1 = LEFT + low * per_second, LEFT + high * per_second
    below = bottom + 18
    width = (high - low) * ACROSS / common.window
    frame = f"M{number(x0)} {number(y - 2)}H{number(x1)}V{number(bottom)}H{number(x0)}z"
    funnel = f"M{number(x0)} {number(bottom)}L{number(LEFT)} {number(below)}"
    funnel += f"M{number(x1)} {number(bottom)}L{number(LEFT + width)} {number(below)}"
    parts.append(path(frame + funnel, "r"))
    parts += _enlarged(phase, common, rows, below + 2)
    return svg(WIDTH, below + 4 + len(rows) * (ZOOMED + 4), title, _summary(phase), "", parts)


def _summary(phase: Phase) -> str:
    return (
        f"{duration(phase.seconds)}: computing {duration(phase.compute_seconds)}, waiting for communication "
        f"{duration(phase.exposed_seconds)}, for launches {duration(phase.host_seconds)}."
    )


def _lane(phase: Phase, row: int, middle: float, per_second: float) -> list[str]:
    """One thin row of the whole pass: what is hidden and what is exposed, each one path."""
    if row == 0:
        working = [(s.start, s.end) for s in phase.spans if s.lane == "compute" and not s.exposed]
        drawn = {"tc": working, "tw": waits(phase)}
    else:
        sent = [s for s in phase.spans if s.lane == "communication" and s.stream == row - 1]
        drawn = {"th": [(s.start, s.end) for s in sent], "te": _cut(sent, waits(phase))}
    return [
        path(strokes([(LEFT + a * per_second, LEFT + b * per_second) for a, b in intervals], middle), look)
        for look, intervals in drawn.items()
        if intervals
    ]


def waits(phase: Phase) -> list[tuple[float, float]]:
    """Stretches in which the compute stream stands idle for communication."""
    return [(s.start, s.end) for s in phase.spans if s.lane == "compute" and s.exposed]


def _cut(spans: Sequence[Span], within: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The parts of exposed spans inside these stretches; both are in order of time."""
    parts, first = [], 0
    for s in spans:
        while first < len(within) and within[first][1] <= s.start:
            first += 1
        place = first
        while s.exposed and place < len(within) and within[place][0] < s.end:
            parts.append((max(s.start, within[place][0]), min(s.end, within[place][1])))
            place += 1
    return parts


def _enlarged(phase: Phase, common: Scale, rows: Sequence[str], top: float) -> list[str]:
    """The enlarged layers: a box per span, named where it is wide enough."""
    low, high = window(phase, common.layers)
    per_second = ACROSS / common.window

    def place(a: float, b: float) -> tuple[float, float]:
        left = LEFT + (max(a, low) - low) * per_second
        return left, max((min(b, high) - max(a, low)) * per_second, 0.4)

    parts = [text(LEFT - 8, top + ZOOMED / 2 + 4, named(common.layers), "m e")]
    for row, _ in enumerate(rows):
        y = top + row * (ZOOMED + 4)
        parts.append(path(f"M{number(LEFT)} {number(y + ZOOMED)}h{number((high - low) * per_second)}", "g"))
    for s in shown(phase, common):
        row = 0 if s.lane == "compute" else 1 + s.stream
        y = top + row * (ZOOMED + 4)
        x, width = place(s.start, s.end)
        words = f"{label_of(s)}, {duration(s.seconds)}"
        look = "zh" if s.lane == "communication" else "zw" if s.exposed else "zc"
        parts.append(rectangle(x, y, width, ZOOMED, look, words))
        if s.lane == "communication":
            for a, b in _cut([s], waits(phase)):
                if b > low and a < high:
                    left, wide = place(a, b)
                    parts.append(rectangle(left, y, wide, ZOOMED, "ze", f"{words}, of it exposed {duration(b - a)}"))
        parts += _written(s, x, y, width, phase)
    return parts


def named(layers: Sequence[int]) -> str:
    """ "layers 24, 25"."""
    return f"layer{'s'[: len(layers) > 1]} {', '.join(map(str, layers))}"


def _written(span: Span, x: float, y: float, width: float, phase: Phase) -> list[str]:
    """The span's name and its duration, if there is room for one of them. Dark where it stands on communication that
    is hidden in its middle."""
    if span.exposed and span.lane == "compute":
        return []
    name, time = label_of(span), f"{digits(span.seconds * 1e6)} µs"
    for words in (f"{name} · {time}", name, name.split()[0], name.rpartition(".")[2], time):
        if len(words) * LETTER + 6 <= width:
            middle = (span.start + span.end) / 2
            hidden = not any(a <= middle <= b for a, b in _cut([span], waits(phase)))
            dark = " k" if span.lane == "communication" and hidden else ""
            return [text(x + width / 2, y + ZOOMED / 2 + 4, words, f"zt c{dark}")]
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

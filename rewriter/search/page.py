"""A search as one HTML file that needs no network, no script and no other file, in light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from rewriter.common.numbers import duration, times
from rewriter.predict import svg
from rewriter.predict.svg import drawing, log_ticks, number, path, text, ticks
from rewriter.search.choices import FORMATS, REWRITES, WORDS
from rewriter.search.report import (
    COLUMNS,
    LEGEND,
    axis_of,
    cells,
    headline,
    layers_of,
    model_name,
    named,
    notes,
    place,
    setting,
    share,
)
from rewriter.search.result import Point, SearchResult, Single

_FRAME = Template(Path(svg.__file__).with_name("page.html").read_text(encoding="utf-8"))
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 1000.0, 460.0, 76.0, 24.0, 16.0, 46.0
_CIRCLE = "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0"
_DIAMOND = "m0-8l8 8-8 8-8-8z"


def page(found: SearchResult, command: str = "") -> str:
    """The file's text; the same arguments give the same bytes. `command`: what made it."""
    title = f"{model_name(found)}: the recipe that fits {found.fabric}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="muted">{escape(setting(found))} · {escape(found.fabric_summary)}</p>',
        f'<p class="lead">{escape(headline(found))}.</p>',
        f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in layers_of(found.chosen.mix))}</ul>",
        "<h2>Speed for loss</h2>",
        f"<figure>{front(found)}<figcaption>{escape(LEGEND)}</figcaption></figure>",
        _points(found),
        "<h2>Each rewrite alone</h2>",
        _singles(found.singles),
        "<h2>The recipe</h2>",
        f'<pre class="wide"><code>{escape(_shortened(found.recipe))}</code></pre>',
        *(f'<p class="muted">{escape(note)}</p>' for note in notes(found)),
        f'<p class="muted">Made by <code>{escape(command)}</code></p>' if command else "",
    ]
    return _FRAME.substitute(title=escape(title), body="\n".join(filter(None, body)))


def front(found: SearchResult) -> str:
    """The drawing: speedups over rises in loss. The rise is logarithmic; what is exact stands at the left edge."""
    low, high = axis_of(found.points)
    speeds = [p.speedup for p in found.points]
    bottom, top = min(speeds), max(max(speeds), min(speeds) + 0.01)

    def x(rise: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * place(rise, low, high)

    def y(speedup: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (speedup - bottom) / (top - bottom)

    parts = []
    for value in log_ticks(low, high):
        parts.append(path(f"M{number(x(value))} {number(TOP)}V{number(HEIGHT - BOTTOM)}", "g"))
        parts.append(text(x(value), HEIGHT - BOTTOM + 16, share(value), "m c"))
    for value in ticks(bottom, top):
        parts.append(path(f"M{number(LEFT)} {number(y(value))}H{number(WIDTH - RIGHT)}", "g"))
        parts.append(text(LEFT - 8, y(value) + 4, times(value), "m e"))
    if low <= found.budget <= high:
        parts.append(path(f"M{number(x(found.budget))} {number(TOP)}V{number(HEIGHT - BOTTOM)}", "r1"))
    line = sorted(found.front, key=lambda p: p.speed.seconds)
    if len(line) > 1:
        data = "L".join(f"{number(x(p.rise.relative))} {number(y(p.speedup))}" for p in line)
        parts.append(path(f"M{data}", "pl s1"))
    parts += [_mark(p, x(p.rise.relative), y(p.speedup), p.mix == found.chosen.mix) for p in found.points]
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(text(middle, HEIGHT - 8, "rise in loss (less is better); dashed: the budget", "m c"))
    words = "Predicted speedups over measured rises in loss; the table below has the points of the front."
    return drawing("front", WIDTH, HEIGHT, "Speed for loss", words, parts)


def _mark(point: Point, x: float, y: float, chosen: bool) -> str:
    words = f"{named(point.mix)}: {times(point.speedup)}, a rise of {share(point.rise.relative)}"
    shape, look = (_DIAMOND, "pp s2") if chosen else (_CIRCLE, "pp s1" if point.front else "pp s0 o")
    return f'<path d="M{number(x)} {number(y)}{shape}" class="{look}"><title>{escape(words)}</title></path>'


def _points(found: SearchResult) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in ("mix", *COLUMNS))
    rows = []
    for point in found.front:
        values = "".join(f"<td>{escape(value)}</td>" for value in cells(point).values())
        mark = " ◆" if point.mix == found.chosen.mix else ""
        rows.append(f"<tr><th>{escape(named(point.mix))}{mark}</th>{values}</tr>")
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _singles(singles: Sequence[Single]) -> str:
    """By layer and rewrite, what it costs alone, in thousandths of a nat per token, and below what it gains."""
    names = [name for name in (*(r.name for r in REWRITES), *FORMATS) if any(s.rewrite == name for s in singles)]
    layers = sorted({s.layer for s in singles})
    head = "".join(f'<th title="{escape(WORDS[name])}">{escape(name)}</th>' for name in names)
    rows = []
    for layer in layers:
        row = []
        for name in names:
            found = [s for s in singles if s.rewrite == name and s.layer == layer]
            plain = next((s for s in found if not s.ordered), None)
            ordered = next((s for s in found if s.ordered), None)
            words = "" if plain is None else f"{1e3 * plain.cost:.2f}"
            words += "" if ordered is None else f" ({1e3 * ordered.cost:.2f})"
            row.append(f"<td>{words}</td>")
        rows.append(f"<tr><th>{layer}</th>{''.join(row)}</tr>")
    gains = "".join(f"<td>{_gain(name, singles)}</td>" for name in names)
    caption = (
        "What a rewrite that begins in a layer costs alone: KL from the original in thousandths of a nat per token; in "
        "brackets with heads and channels in a measured order. Last row: by how much a generation gets faster, at most."
    )
    return (
        f'<p>{escape(caption)}</p><div class="wide"><table><thead><tr><th>layer</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}<tr><th>gain</th>{gains}</tr></tbody></table></div>"
    )


def _gain(name: str, singles: Sequence[Single]) -> str:
    gains = [s.gain for s in singles if s.rewrite == name and s.gain is not None]
    return "–" if not gains else duration(max(gains)) if max(gains) > 0 else "none"


def _shortened(recipe: str) -> str:
    """The recipe without the middle of long orders of units."""
    return "\n".join(line if len(line) <= 140 else f"{line[:100]} … {line[-20:]}" for line in recipe.splitlines())

"""Elements of drawings as text, and round numbers for their axes. No script: the same figures give the same bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

_FINEST = 0.3  # units of x


def text(x: float, y: float, words: str, style: str = "") -> str:
    """A line of text at its baseline. `style`: CSS classes."""
    return f'<text x="{number(x)}" y="{number(y)}"{_class(style)}>{escape(words)}</text>'


def path(data: str, style: str = "", title: str = "") -> str:
    """A path; `title` is shown when a pointer rests on it, and read aloud."""
    return f'<path d="{data}"{_class(style)}>{_title(title)}</path>'


def rectangle(x: float, y: float, width: float, height: float, style: str, title: str = "", round: float = 0) -> str:
    """A box with corners of radius `round`."""
    corners = f' rx="{number(round)}"' if round else ""
    size = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"{corners}'
    return f"<rect {size}{_class(style)}>{_title(title)}</rect>"


def circle(x: float, y: float, radius: float, style: str, title: str = "") -> str:
    """A circle."""
    return f'<circle cx="{number(x)}" cy="{number(y)}" r="{number(radius)}"{_class(style)}>{_title(title)}</circle>'


def number(value: float) -> str:
    """A coordinate, to a tenth of a unit."""
    short = f"{value:.1f}"
    return short[:-2] if short.endswith(".0") else short


def svg(width: float, height: float, title: str, description: str, style: str, parts: Iterable[str]) -> str:
    """An `<svg>` for a page, which screen readers announce. It is as wide as its place: at most `width` pixels, and at
    least 640 (or `width`, if that is less), so that it scrolls on a narrow page. `style`: CSS rules; empty if those of
    the page are enough."""
    widths = f"width:100%;min-width:{number(min(width, 640))}px;max-width:{number(width)}px"
    return (
        f'<svg viewBox="0 0 {number(width)} {number(height)}" role="img" aria-label="{escape(title)}" '
        f'style="{widths};height:auto"><desc>{escape(description)}</desc>'
        f"{f'<style>{style}</style>' if style else ''}{''.join(parts)}</svg>"
    )


def strokes(intervals: Sequence[tuple[float, float]], y: float) -> str:
    """Intervals of x as the data of one path, to be stroked as wide as a lane. Those nearer than `_FINEST` are joined,
    and none is narrower, so that a thousand of them stay a few kilobytes."""
    joined: list[tuple[float, float]] = []
    for low, high in sorted(intervals):
        high = max(high, low + _FINEST)
        if joined and low - joined[-1][1] < _FINEST:
            joined[-1] = (joined[-1][0], max(joined[-1][1], high))
        else:
            joined.append((low, high))
    # from rounded places, not rounded lengths: errors of relative moves would add up
    data, at = "", 0.0
    for low, high in joined:
        low, high = round(low, 1), round(high, 1)
        data += f"m{number(low - at)} 0" if data else f"M{number(low)} {number(y)}"
        data += f"h{number(high - low)}"
        at = high
    return data


def ticks(low: float, high: float) -> list[float]:
    """Round numbers between the two, at most nine."""
    step = 10.0 ** math.floor(math.log10((high - low) / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (factor * step) <= 8)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(step * k, 12) for k in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten between the two, which are positive; only the powers over more than three
    decades."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1,) if high / low > 1e3 else (1, 2, 5)
    return [f * 10.0**d for d in decades for f in factors if low * (1 - 1e-9) <= f * 10.0**d <= high * (1 + 1e-9)]


def _class(style: str) -> str:
    return f' class="{style}"' if style else ""


def _title(words: str) -> str:
    return f"<title>{escape(words)}</title>" if words else ""

"""What charts share: elements as text, axes with round numbers, colours that follow the reader's light or dark page.

No dependency, no script: the same figures give the same bytes. Colours are CSS classes of the page that a chart stands
in (`page.html`), so that one drawing serves both schemes. Blue, vermilion and grey-green stay apart for colour-blind
readers (Okabe and Ito's palette, adapted to each ground).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

_FINEST = 0.3  # units of x
SERIES = 8  # colours --s0 to --s7


def text(x: float, y: float, words: str, style: str = "") -> str:
    """A line of text at its baseline. `style`: CSS classes."""
    return f'<text x="{number(x)}" y="{number(y)}"{_class(style)}>{escape(words)}</text>'


def path(data: str, style: str = "") -> str:
    """A path. `style`: CSS classes."""
    return f'<path d="{data}"{_class(style)}/>'


def rectangle(x: float, y: float, width: float, height: float, style: str, title: str) -> str:
    """A filled box; `title` is shown when a pointer rests on it, and read aloud."""
    shape = f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"{_class(style)}'
    return f"{shape}><title>{escape(title)}</title></rect>"


def drawing(name: str, width: float, height: float, title: str, description: str, parts: Iterable[str]) -> str:
    """An `<svg>` that screen readers announce by its title and description. `name`: unique in the page."""
    return (
        f'<svg viewBox="0 0 {number(width)} {number(height)}" role="img" aria-labelledby="{name}-t {name}-d">'
        f'<title id="{name}-t">{escape(title)}</title><desc id="{name}-d">{escape(description)}</desc>'
        f"{''.join(parts)}</svg>"
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


def number(value: float) -> str:
    """A coordinate, to a tenth of a unit."""
    short = f"{value:.1f}"
    return short[:-2] if short.endswith(".0") else short


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

"""Elements of drawings as text. No dependency, no script: the same figures give the same bytes."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


def text(x: float, y: float, words: str, style: str = "") -> str:
    """A line of text at its baseline. `style`: CSS classes."""
    return f'<text x="{number(x)}" y="{number(y)}"{_class(style)}>{escape(words)}</text>'


def path(data: str, style: str, title: str = "") -> str:
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
    """An `<svg>` as wide as its place, at most its own `width`, that screen readers announce. `style`: CSS rules."""
    return (
        f'<svg viewBox="0 0 {number(width)} {number(height)}" role="img" aria-label="{escape(title)}" '
        f'style="width:100%;max-width:{number(width)}px;height:auto"><desc>{escape(description)}</desc>'
        f"<style>{style}</style>{''.join(parts)}</svg>"
    )


def _class(style: str) -> str:
    return f' class="{style}"' if style else ""


def _title(words: str) -> str:
    return f"<title>{escape(words)}</title>" if words else ""

"""HTML files that need no network, no script and no other file, in light and dark, from the Jinja2 templates in
`templates/`. All of them extend `base.html.j2`. The same arguments give the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rewriter.common import numbers

_PAGES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates"), encoding="utf-8"), autoescape=True,
    undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
)  # fmt: skip
_PAGES.filters |= {name: getattr(numbers, name) for name in ("digits", "duration", "times")}


def render(template: str, **values: Any) -> str:
    """The text of a page. Values are escaped; a drawing, which is SVG already, is marked `safe` in the template."""
    return _PAGES.get_template(template).render(values)

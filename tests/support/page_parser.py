"""A parser that checks that the elements of a page are closed, and keeps what it has seen."""

from __future__ import annotations

from html.parser import HTMLParser


class Balance(HTMLParser):
    """Elements that are open, where closing them is not optional."""

    OPTIONAL = frozenset({"meta", "th", "td", "tr", "thead", "tbody"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.OPTIONAL:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.OPTIONAL:
            assert self.open.pop() == tag

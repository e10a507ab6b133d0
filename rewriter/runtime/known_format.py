"""Formats that a user names: those of `rewriter.kernels`, whose errors say where the name was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rewriter.common.errors import RewriterError
from rewriter.kernels import Format

Parsed = TypeVar("Parsed", Format, tuple[Format, Format])


def known_format(name: str | Format, about: str, parse: Callable[[str | Format], Parsed]) -> Parsed:
    """`parse(name)`, of `parse_format` or `parse_formats`. Raises RewriterError, which begins with `about`, for a name
    that is none."""
    try:
        return parse(name)
    except ValueError as error:
        raise RewriterError(f"{about}: {error}") from None

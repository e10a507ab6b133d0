"""Errors that users see, with quotes of what was given and the nearest known name. Imports nothing of ours."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RewriterError(Exception):
    """A failure reported to the user: its message names the thing, the value, what was expected and the next step."""

    exit_code = 2


class VerificationError(RewriterError):
    """The rewritten model does not compute what its recipe says. Nothing is written."""

    exit_code = 3


def shortened(value: object, most: int = 120) -> str:
    """Text of a value for a message: its beginning where it is longer than `most` characters."""
    text = str(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, or None where nothing is close."""
    known = list(known)
    if close := difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6):
        return close[0]
    # `layer` for `ladder.layers`, `half` for `upper-half`: too short for the ratio, yet plain.
    contained = [candidate for candidate in known if len(name) >= 3 and (name in candidate or candidate in name)]
    return contained[0] if len(contained) == 1 else None


def did_you_mean(name: str, known: Iterable[str], *, what: str = "known") -> str:
    """`Did you mean 'x'? known: x, y.`, the sentence that closes every "unknown name" message."""
    known = list(known)
    guess = nearest(name, known)
    question = f"Did you mean {guess!r}? " if guess else ""
    return f"{question}{what[:1].upper()}{what[1:]}: {', '.join(known) or 'none'}."

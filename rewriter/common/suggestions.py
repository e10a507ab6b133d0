"""The nearest known name for one that is not known. Imports nothing of ours."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, or None where nothing is close."""
    known = list(known)
    found = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    if found:
        return found[0]
    # `layer` for `ladder.layers`, `half` for `upper-half`: too short for the ratio, yet plain.
    contained = [candidate for candidate in known if len(name) >= 3 and (name in candidate or candidate in name)]
    return contained[0] if len(contained) == 1 else None


def did_you_mean(name: str, known: Iterable[str], *, what: str = "known") -> str:
    """`Did you mean 'x'? known: x, y.`, the sentence that closes every "unknown name" message."""
    known = list(known)
    guess = nearest(name, known)
    question = f"Did you mean {guess!r}? " if guess else ""
    return f"{question}{what[:1].upper()}{what[1:]}: {', '.join(known) or 'none'}."

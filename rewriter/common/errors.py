"""What is reported when something cannot be done, and how it quotes what was given. Imports nothing."""

from __future__ import annotations


class RewriterError(Exception):
    """A failure reported to the user: its message names the thing, the value, what was expected and the next step."""

    exit_code = 2


class VerificationError(RewriterError):
    """The rewritten model does not compute what its recipe says. Nothing is written."""

    exit_code = 3


def shortened(value: object, most: int = 120) -> str:
    """What was given, for a message: the beginning of it where it is longer than `most` characters."""
    text = str(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"

"""What is reported when something cannot be done. Imports nothing."""

from __future__ import annotations


class RewriterError(Exception):
    """A failure reported to the user: its message names the thing, the value, what was expected and the next step."""

    exit_code = 2


class VerificationError(RewriterError):
    """The rewritten model does not compute what its recipe says. Nothing is written."""

    exit_code = 3

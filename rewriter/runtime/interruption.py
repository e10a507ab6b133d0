"""An error between messages is not forgotten: ranks are out of step from then on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rewriter.common.errors import RewriterError

_interrupted: list[str] = []  # the errors that ended calls of this process


@contextmanager
def messages_under_way(what: str) -> Iterator[None]:
    """Messages of `what` are under way within it. After an error, a later call would take what has yet to arrive for
    its own: from then on RewriterError is raised instead, for all that uses this, in all threads."""
    if _interrupted:
        raise RewriterError(
            f"{what}: an earlier call in this process ended in {_interrupted[0]} with messages under way, which later "
            "calls would take for theirs. Start all processes again"
        )
    try:
        yield
    except BaseException as error:
        _interrupted.append(f"{type(error).__name__}({error})")
        raise

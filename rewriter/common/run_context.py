"""Progress and trust of one call of the public API."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

ProgressCall = Callable[..., None]
"""Called with a stage, and while one runs with how much is done: `progress("weights", done, total)`, in the stage's
own unit (bytes, layers, steps). Figures by name (`loss=`) may follow."""


def silent(*_: object, **__: object) -> None:
    """Show no progress."""


@dataclass(frozen=True)
class RunContext:
    """The receiver of a call's progress, and True if Python code that a checkpoint brings may run.

    `trust_remote_code` means what it means in transformers. Every function of the API that reads a model takes one.
    """

    progress: ProgressCall = silent
    trust_remote_code: bool = False

"""Programs of the same model with other sizes: made by the room that traces, asked for by passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rewriter.common.errors import RewriterError
from rewriter.ir.program import Program
from rewriter.weights.padding import PaddedTensors

Stored = Callable[[Program], PaddedTensors | None]
"""From the program of other sizes, without weights, to what a checkpoint of it holds; None where the source has no
checkpoint."""


@dataclass(frozen=True)
class Sizes:
    """Settings of a text model by their names in its config. Those `on_load` cannot stand in config.json, since its
    class refuses them there: they are given to whatever loads the checkpoint. `model_type`, if not the source's, is
    that of other classes that compute the same."""

    settings: Mapping[str, Any]
    on_load: Mapping[str, Any] = field(default_factory=dict)
    model_type: str | None = None

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in {**self.settings, **self.on_load}.items())


class CannotBuild(RewriterError):
    """The model's own classes refuse the settings."""


Resize = Callable[[Program, Sizes, Stored], Program]
_resize: list[Resize] = []


def resize_with(resize: Resize) -> None:
    """Let `resized` be what `resize(program, sizes, stored)` returns."""
    _resize[:] = [resize]


def resized(program: Program, sizes: Sizes, stored: Stored) -> Program:
    """`program` as traced with other sizes.

    Its weights are those of the program's checkpoint, padded as `stored` says. Raises CannotBuild where the model
    cannot be built with them, and RewriterError where it cannot be traced, or needs other weights.
    """
    if not _resize:
        raise RewriterError("a program of other sizes is traced anew: import rewriter.tracing first")
    return _resize[0](program, sizes, stored)

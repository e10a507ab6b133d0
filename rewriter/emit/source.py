"""What the source's own classes say: the signature of the decoder layer, and where the config is defined."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from dataclasses import dataclass

from rewriter.emit.python import constant
from rewriter.errors import RewriterError
from rewriter.program import Source


@dataclass(frozen=True)
class Argument:
    """One parameter of the source layer's `forward`. `default` is Python text, None where it has none.

    `read` says that the source's code reads it.
    """

    name: str
    default: str | None
    read: bool

    def __str__(self) -> str:
        return self.name if self.default is None else f"{self.name}={self.default}"


def require_importable(source: Source) -> None:
    """Raise RewriterError unless the source's classes come with transformers, where an emitted file can import them."""
    if not source.module.startswith("transformers."):
        raise RewriterError(
            f"{source.architecture} comes from the model's own code ({source.module}), which an emitted file cannot "
            "import. Convert a model whose classes are part of transformers."
        )


def layer_arguments(source: Source) -> list[Argument]:
    """The parameters of the decoder layer's `forward`, the hidden state first, without **kwargs."""
    forward = getattr(importlib.import_module(source.module), source.layer_class).forward
    definition = ast.parse(textwrap.dedent(inspect.getsource(forward))).body[0]
    read = {n.id for n in ast.walk(definition) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    parameters = inspect.signature(forward).parameters
    return [
        Argument(
            name,
            None if parameters[name].default is inspect.Parameter.empty else constant(parameters[name].default),
            name in read,
        )
        for name in source.layer_arguments
    ]


def config_module(source: Source) -> str:
    """The module that defines the config class."""
    return str(getattr(importlib.import_module(source.module), source.config_class).__module__)

"""Facts that the source's own classes state: the signature of the decoder layer, and where the config is defined."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import sys
import textwrap
from dataclasses import dataclass
from typing import Any

from transformers import CONFIG_MAPPING

from rewriter.common.errors import RewriterError
from rewriter.emit.python_source import literal
from rewriter.ir import Source


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
    forward, definition = _forward(source)
    read = {n.id for n in ast.walk(definition) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    parameters = inspect.signature(forward).parameters
    return [
        Argument(
            name,
            None if parameters[name].default is inspect.Parameter.empty else literal(parameters[name].default),
            name in read,
        )
        for name in source.layer_arguments
    ]


@functools.cache
def _most_by_place(module: str) -> int | None:
    """The most arguments that loops of a module pass by place to what they go through; None where none calls it."""
    most = None
    for loop in ast.walk(ast.parse(inspect.getsource(importlib.import_module(module)))):
        if not isinstance(loop, ast.For):
            continue
        own = {name.id for name in ast.walk(loop.target) if isinstance(name, ast.Name)}
        for call in ast.walk(loop):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in own:
                starred = any(isinstance(argument, ast.Starred) for argument in call.args)
                most = max(most or 0, sys.maxsize if starred else len(call.args))
    return most


def passed_by_place(source: Source) -> int:
    """Number of arguments that the model passes its layers by place; all where its code does not show it."""
    counts = [_most_by_place(module) for module in {source.module, source.module_of(source.layer_class)}]
    known = [count for count in counts if count is not None]
    return min(max(known, default=sys.maxsize), len(source.layer_arguments))


def owner_of_layers(source: Source) -> str:
    """The path in the causal LM of the module whose calls compute its layers: its base model, but where the causal LM's
    own code calls the module inside it that owns the layers."""
    base, _, inside = source.layers.partition(".")
    owner = inside.rpartition(".")[0]
    if not owner:
        return base
    forward = inspect.unwrap(getattr(importlib.import_module(source.module), source.architecture).forward)
    calls = (n for n in ast.walk(_definition(forward)) if isinstance(n, ast.Call))
    return f"{base}.{owner}" if f"self.{base}.{owner}" in {ast.unparse(call.func) for call in calls} else base


def _forward(source: Source) -> tuple[Any, ast.stmt]:
    """The forward of the source's layer, and its definition as a syntax tree."""
    module = importlib.import_module(source.module_of(source.layer_class))
    forward = getattr(module, source.layer_class).forward
    return forward, _definition(forward)


def _definition(function: Any) -> ast.stmt:
    return ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]


def config_module(source: Source) -> str:
    """The module that defines the config class; a type may borrow the model's classes from another one."""
    imported = getattr(importlib.import_module(source.module), source.config_class, None)
    return str((imported or CONFIG_MAPPING[source.model_type]).__module__)

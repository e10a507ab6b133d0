"""Image features that a model adds to the residual stream between its decoder layers (deepstack).

A trace of text alone does not see it, so it is found in the code of the loop over the layers: under a condition on one
of its arguments, `forward` gives the variable that the next layer is called with another value than the layer before
returned.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from rewriter.common.errors import RewriterError


def require_text_alone(model: PreTrainedModel, error: BaseException) -> None:
    """Raise RewriterError where `error`, of a call of `model` with text alone, says that it needs an image."""
    if any(name in str(error) for name in ("pixel_values", "flattened_patches")):
        raise RewriterError(
            f"{type(model).__name__} needs an image in every call, and a model is traced by text alone. If "
            "it has a language model, save that module alone with save_pretrained, and rewrite the result."
        ) from error


def joined_layers(model: PreTrainedModel, layers_path: str) -> int:
    """Behind how many of the first decoder layers the model adds image features to what they return; 0 for most.

    Their number is that of the settings that say which layers of the tower give them; all layers where none says it. A
    text model by itself is given none.
    """
    if model.config.get_text_config() is model.config or not _joins(
        model.get_submodule(layers_path.rpartition(".")[0])
    ):
        return 0
    given = [len(value) for name, value in _settings(model.config.to_dict()) if "deepstack" in name]
    return max(given, default=len(model.get_submodule(layers_path)))


def _joins(decoder: nn.Module) -> bool:
    forward = inspect.unwrap(type(decoder).forward)
    try:
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(forward))).body
    except (OSError, SyntaxError, ValueError):
        return False
    arguments = set(inspect.signature(forward).parameters) - {"self"}
    return any(
        _assigns(branch, stream)
        for loop in ast.walk(definition)
        if isinstance(loop, ast.For)
        for stream in _streams(loop)
        for branch in loop.body
        if isinstance(branch, ast.If) and arguments & _names(branch.test)
    )


def _streams(loop: ast.For) -> Iterator[str]:
    """The variable that each call of the loop's own layer is given first."""
    own = _names(loop.target)
    for call in ast.walk(loop):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in own:
            first = call.args[0] if call.args else next((k.value for k in call.keywords), None)
            if isinstance(first, ast.Name):
                yield first.id


def _assigns(branch: ast.If, name: str) -> bool:
    targets = [t for node in ast.walk(branch) if isinstance(node, ast.Assign) for t in node.targets]
    targets += [node.target for node in ast.walk(branch) if isinstance(node, ast.AugAssign)]
    return any(name in _names(target) for target in targets)


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _settings(value)
        elif isinstance(value, (list, tuple)):
            yield str(name), list(value)

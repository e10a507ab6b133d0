"""The conversions that transformers makes of a checkpoint while it loads, as expressions over stored tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from rewriter.common.errors import RewriterError
from rewriter.weights.expressions import Concat, Expression, Shapes, Slice, Stack, Take, Transpose

# Operations that only move elements, along one dimension (`dim`, else the first): run on places, they say where to.
_MOVING = ("Chunk", "Split", "Interleave", "PermuteForRope", "Inkling2UnpadVocab")


def converted(
    model: PreTrainedModel,
    converter: Any,
    sources: Mapping[str, list[str]],
    target: str,
    tensors: Mapping[str, Expression],
    shapes: Shapes,
) -> dict[str, Expression]:
    """The parameters that transformers' `converter` makes, by name, of the tensors that `sources` names by pattern.

    `target` is the first parameter's name, `shapes` are those of the stored tensors. Raises RewriterError where a
    source is missing, and for an operation that does not only move elements.
    """
    patterns, targets = converter.source_patterns, converter.target_patterns
    kinds = [type(operation).__name__ for operation in converter.operations]
    if unknown := [kind for kind in kinds if kind not in ("MergeModulelist", "Concatenate", "Transpose", *_MOVING)]:
        raise RewriterError(
            f"{target}: transformers makes it by {unknown[0]}, a conversion of its type's checkpoints that is not "
            "supported. Load the model with transformers and save it in its present form (save_pretrained with "
            "save_original_format=False)."
        )
    if lacking := [p for p in patterns if p not in sources]:
        raise RewriterError(f"{target}: the checkpoint has no tensor like *{lacking[0]}, needed to build it.")
    values = {p: [tensors[n] for n in sources[p]] for p in patterns}
    for kind, operation in zip(kinds, converter.operations, strict=True):
        alone = all(len(group) == 1 for group in values.values())
        if kind == "MergeModulelist":
            stacked: list[list[Expression]] = [[Stack(tuple(group), operation.dim)] for group in values.values()]
            values = dict(zip(targets if len(values) == 1 else values, stacked, strict=False))
        elif kind == "Concatenate":
            values = {targets[0]: [Concat(tuple(e for group in values.values() for e in group), operation.dim)]}
        elif kind == "Transpose" and alone:
            # Undone where the stored tensor has the parameter's shape already, if the operation looks at that.
            fits = tuple(model.get_parameter(target).shape) if getattr(operation, "check_dims", False) else None
            names = targets if len(values) == len(targets) == 1 else values
            moved: list[list[Expression]] = [
                [e if e.shape(shapes) == fits else Transpose(e, operation.dim0, operation.dim1)]
                for [e] in values.values()
            ]
            values = dict(zip(names, moved, strict=True))
        elif kind in _MOVING and alone:
            values = _moved(model, converter, operation, target, {p: e for p, [e] in values.items()}, shapes)
        else:
            raise RewriterError(f"{target}: the checkpoint has several tensors where its conversion takes one of each.")
    if not all(len(group) == 1 for group in values.values()):
        raise RewriterError(f"{target}: its conversion gives several tensors where one is expected.")
    for pattern in values:  # as transformers does: what stands around the first that is found
        before, found, behind = target.partition(pattern)
        if found:
            return {before + name + behind: e for name, [e] in values.items()}
    [[expression], *others] = values.values()
    if others:
        raise RewriterError(f"{target}: its conversion gives {1 + len(others)} tensors where one is expected.")
    return {target: expression}


def _moved(
    model: PreTrainedModel, converter: Any, operation: Any, target: str, given: Mapping[str, Expression], shapes: Shapes
) -> dict[str, list[Expression]]:
    """What `operation` makes of `given`: it is run on the places along its dimension, all other sizes being 1."""
    dim = getattr(operation, "dim", 0)
    places: dict[str, torch.Tensor] = {}
    begins: list[tuple[int, Expression]] = []
    total = 0
    for pattern, expression in given.items():
        shape = expression.shape(shapes)
        size = shape[dim]
        thin = [size if d == dim % len(shape) else 1 for d in range(len(shape))]
        places[pattern] = torch.arange(total, total + size).view(thin)
        begins.append((total, expression))
        total += size
    result = operation.convert(
        places,
        source_patterns=converter.source_patterns,
        target_patterns=converter.target_patterns,
        full_layer_name=target,
        model=_PlacesModel(model),
        config=model.config,
        missing_keys=None,
    )
    found: dict[str, list[Expression]] = {}
    for name, moved in result.items():
        begin, expression = max((b, e) for b, e in begins if b <= int(moved.min()))
        found[name] = [_picked(expression, dim % moved.dim(), [p - begin for p in moved.flatten().tolist()], shapes)]
    return found


class _PlacesModel:
    """The model, as operations look at it: its parameters have their shapes, and the dtype of places."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def get_parameter(self, name: str) -> torch.Tensor:
        return torch.empty(self.model.get_parameter(name).shape, dtype=torch.int64, device="meta")


def _picked(expression: Expression, dim: int, places: list[int], shapes: Shapes) -> Expression:
    """The elements of `expression` at `places` along `dim`, in the plainest form."""
    begin, end = places[0], places[0] + len(places)
    if places != list(range(begin, end)):
        return Take(expression, dim, tuple(places))
    if len(places) == expression.shape(shapes)[dim]:
        return expression
    return Slice(expression, dim, ((begin, end),))

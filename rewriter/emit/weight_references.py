"""What each rank holds, as ranges of the adapted checkpoint's tensors instead of the source's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from rewriter.common.errors import RewriterError
from rewriter.common.expressions import (
    Concat,
    Dequantized,
    Expression,
    Reference,
    Shapes,
    Slice,
    Stack,
    Take,
    Tensor,
    Transpose,
)
from rewriter.emit.changed_weights import lowered
from rewriter.ir import Program
from rewriter.weights import Checkpoint
from rewriter.weights.checkpoint import mixed_dtypes
from rewriter.weights.narrowing import is_dequantized

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_OF_TORCH = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def cast_dtypes(program: Program, checkpoint: Checkpoint) -> dict[str, str]:
    """By parameter, the dtype to cast it to, as safetensors calls it, of those stored in another than that.

    A model whose parameters are stored in several dtypes computes in one: transformers casts all to the config's, or
    where that says none to the first tensor's, but for those that its class keeps in fp32. Where all are stored alike
    none is cast. Raises RewriterError for a parameter that is made of tensors of several dtypes.
    """
    stored = {
        name: spec.expression.dtypes(checkpoint.dtypes)
        for name, spec in program.parameters.items()
        if spec.expression is not None and not is_dequantized(spec.expression)
    }
    for name, dtypes in stored.items():
        if len(dtypes) > 1 and (expression := program.parameters[name].expression) is not None:
            raise mixed_dtypes(checkpoint, expression)
    if len(set().union(*stored.values()) & FLOATS) < 2:
        return {}
    inside = sorted(checkpoint.headers[checkpoint.files[0]].tensors)
    first = next((dtype for name in inside if (dtype := checkpoint.dtypes[name]) in FLOATS), "F32")
    usual = _OF_TORCH.get(str(program.source.config.get("dtype")), first)
    kept = [pattern.replace("*", ".*") for pattern in program.source.fp32]
    wanted = {n: "F32" if any(re.search(pattern, n) for pattern in kept) else usual for n in stored}
    return {name: wanted[name] for name, dtypes in stored.items() if dtypes <= FLOATS and dtypes != {wanted[name]}}


def weight_references(
    program: Program, changed: Mapping[str, Expression], shapes: Shapes, casts: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Reference]:
    """By parameter of `program`, how ranks make it from the adapted checkpoint. `casts`: see `cast_dtypes`.

    `changed` are the tensors that the adapted checkpoint stores in place of the source's, as expressions over the
    source's, whose `shapes` are given. Raises RewriterError for a parameter without weights, or one that needs
    elements that the adapted checkpoint lacks.
    """
    stored = {expression: Tensor(name) for name, expression in changed.items()}
    found = {}
    for name, spec in program.parameters.items():
        if spec.expression is None:
            raise RewriterError("this program was traced from a config: it has no weights to read")
        expression = _adapted(spec.expression, changed, stored, shapes) if changed else spec.expression
        found[name] = Reference(expression, spec.dim, spec.ranges, casts.get(name))
    return found


def _adapted(
    expression: Expression, changed: Mapping[str, Expression], stored: Mapping[Expression, Tensor], shapes: Shapes
) -> Expression:
    """`expression`, over the source's tensors, over those of the adapted checkpoint."""
    if expression in stored:
        return stored[expression]
    if isinstance(expression, Take) and (inside := lowered(expression, shapes)) != expression:
        return _adapted(inside, changed, stored, shapes)
    match expression:
        case Tensor(name):
            return _original(changed[name], Tensor(name), shapes) if name in changed else expression
        case Dequantized():  # quantized weights are not changed
            return expression
        case Concat(parts) | Stack(parts):
            return replace(expression, parts=tuple(_adapted(part, changed, stored, shapes) for part in parts))
        case Take(source, dim, index):
            return _take(_adapted(source, changed, stored, shapes), dim, index)
        case Slice(source) | Transpose(source):
            return replace(expression, source=_adapted(source, changed, stored, shapes))


def _original(change: Expression, tensor: Tensor, shapes: Shapes) -> Expression:
    """The source's tensor, given that the adapted checkpoint stores `change` under its name."""
    if isinstance(change, Take):  # other elements' places: the inverse puts them back
        size = change.source.shape(shapes)[change.dim]
        places = {place: stands for stands, place in enumerate(change.index)}
        if len(places) == size:
            inverse = tuple(places[place] for place in range(size))
            if change.source == tensor:
                return Take(tensor, change.dim, inverse)
    if isinstance(change, Concat) and tensor in change.parts:
        before = change.parts[: change.parts.index(tensor)]
        start = sum(part.shape(shapes)[change.dim] for part in before)
        return Slice(tensor, change.dim, ((start, start + tensor.shape(shapes)[change.dim]),))
    raise RewriterError(
        f"{tensor}: the adapted checkpoint stores {change}, from which the ranks cannot make what they hold. Write the "
        "ranks' weights beside it with --materialize"
    )


def _take(source: Expression, dim: int, index: tuple[int, ...]) -> Expression:
    """`Take`, where one of it suffices for two."""
    if isinstance(source, Take) and source.dim == dim:
        index = tuple(source.index[place] for place in index)
        source = source.source
        if index == tuple(range(len(index))) and isinstance(source, Tensor):
            return source
    return Take(source, dim, index)

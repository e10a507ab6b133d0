"""Tensors that each rank holds, as ranges of the adapted checkpoint's tensors instead of the source's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from rewriter.common.errors import RewriterError
from rewriter.emit.files.kept_tensors import KeptTensors
from rewriter.ir import Program
from rewriter.weights import Checkpoint
from rewriter.weights.checkpoint import FLOATS, TORCH_DTYPES
from rewriter.weights.expressions import (
    Concat,
    Dequantized,
    Expression,
    Mean,
    Reference,
    Shapes,
    Slice,
    Stack,
    Take,
    Tensor,
    Transpose,
    is_dequantized,
)
from rewriter.weights.quantized_tensors import OF_TORCH, usual_dtype


def written_dtypes(program: Program, kept: KeptTensors, target: torch.dtype | None) -> dict[str, str]:
    """By tensor of the adapted checkpoint, the dtype that it is written in, as safetensors calls it.

    With `target` (bf16, fp16, fp32) that is what transformers would load it in, so some stay fp32 in any dtype.
    `program` is the one of `kept`.
    """
    dtypes = {name: next(iter(tensor.dtypes(kept.checkpoint.dtypes))) for name, tensor in kept.tensors.items()}
    if target is None:
        return dtypes
    dtype = OF_TORCH[str(target).removeprefix("torch.")]
    read = {
        (name, n) for name, spec in program.parameters.items() if spec.expression for n in spec.expression.tensors()
    }
    fp32 = {stored for name, stored in {*read, *((n, n) for n in dtypes)} if kept_in_fp32(program, dtype, name)}
    return {n: stored if stored not in FLOATS else "F32" if n in fp32 else dtype for n, stored in dtypes.items()}


def kept_in_fp32(program: Program, dtype: str, name: str) -> bool:
    """True where transformers has the parameter `name` in fp32 in a model of `dtype`, as safetensors calls it."""
    return any(re.search(pattern, name) for pattern in program.source.fp32.get(TORCH_DTYPES[dtype], ()))


def cast_dtypes(
    program: Program, checkpoint: Checkpoint, written: Mapping[str, str], config: Mapping[str, Any]
) -> dict[str, str]:
    """By parameter, the dtype to cast it to, as safetensors calls it, of those stored in another than that.

    `written` are the dtypes of the adapted checkpoint's tensors, `config` its config.json. A model whose parameters are
    stored in several dtypes computes in one: transformers casts all to the config's, or where that says none to the
    first tensor's, but for those that it has in fp32. What quantized weights stand for counts as stored in that dtype.
    Where all are stored in one dtype they are computed with in that dtype.
    """
    stored = {
        n: spec.expression.dtypes(written) for n, spec in program.parameters.items() if spec.expression is not None
    }
    floats = set().union(*stored.values()) & FLOATS
    usual = usual_dtype(checkpoint, config) if len(floats) > 1 else next(iter(floats), "F32")
    wanted = {n: "F32" if kept_in_fp32(program, usual, n) else usual for n in stored}
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
    references = {}
    for name, spec in program.parameters.items():
        if spec.expression is None:
            raise RewriterError("this program was traced from a config: it has no weights to read")
        expression = _adapted(spec.expression, changed, stored, shapes) if changed else spec.expression
        references[name] = Reference(expression, spec.dim, spec.ranges, casts.get(name))
    return references


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
        case Dequantized() | Mean():  # quantized weights are not changed, nor is padding of a vocabulary
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


# --- tensors of the adapted checkpoint that are not the source's


def changed_tensors(program: Program, shapes: Shapes) -> dict[str, Expression]:
    """By name on disk, what the adapted checkpoint of `program` stores instead of the source's tensor.

    `shapes` are those of the source's tensors. Raises RewriterError where a changed parameter is made of several
    tensors of the checkpoint, and not by putting each of them in another order.
    """
    origin = program.origin or program
    changed: dict[str, Expression] = {}
    for name, spec in program.parameters.items():
        before = origin.parameters[name].expression if name in origin.parameters else None
        if spec.expression is None or spec.expression == before or before is None:
            continue
        inside = (
            {before.name: spec.expression} if isinstance(before, Tensor) else _inside(before, spec.expression, shapes)
        )
        if inside is None and is_dequantized(before):
            raise RewriterError(
                f"{name}: the recipe changes its weights, which are stored quantized, as {before}. Write them "
                "dequantized with --dequantize"
            )
        if inside is None:
            raise RewriterError(
                f"{name}: its weights cannot be stored as {spec.expression}, since on disk it is {before}"
            )
        changed |= {tensor: expression for tensor, expression in inside.items() if expression != Tensor(tensor)}
    return changed


def untied_tensors(changed: dict[str, Expression]) -> list[str]:
    """The changed tensors that hold weights of every rank, one after the other; sorted."""
    return sorted(name for name, expression in changed.items() if isinstance(expression, Concat))


def _inside(before: Expression, after: Expression, shapes: Shapes) -> dict[str, Expression] | None:
    """By tensor that `before` reads, what `after` reads in its place; None where they differ by more than orders."""
    after = lowered(after, shapes)
    if isinstance(before, Tensor):
        moved = isinstance(after, Take) and after.source == before
        return {before.name: after} if moved or after == before else None
    pairs: list[tuple[Expression, Expression]]
    if isinstance(before, (Concat, Stack)) and isinstance(after, (Concat, Stack)):
        alike = (type(before), before.dim, len(before.parts)) == (type(after), after.dim, len(after.parts))
        pairs = list(zip(before.parts, after.parts, strict=True)) if alike else []
    elif isinstance(before, Transpose) and isinstance(after, Transpose):
        alike = (before.dim0, before.dim1) == (after.dim0, after.dim1)
        pairs = [(before.source, after.source)]
    else:
        return None
    changed: dict[str, Expression] = {}
    for part, other in pairs if alike else ():
        inside = _inside(part, other, shapes)
        if inside is None or any(changed.get(name, expression) != expression for name, expression in inside.items()):
            return None
        changed |= inside
    return changed if alike else None


def lowered(expression: Expression, shapes: Shapes) -> Expression:
    """The same, where the outermost `Take` is one of the parts instead, if no place crosses from part to part."""
    if not isinstance(expression, Take):
        return expression
    source, dim, index = lowered(expression.source, shapes), expression.dim, expression.index
    if isinstance(source, Take) and source.dim == dim and source.fill is None:
        return lowered(Take(source.source, dim, tuple(source.index[place] for place in index)), shapes)
    if isinstance(source, Transpose):
        inner = {source.dim0: source.dim1, source.dim1: source.dim0}.get(dim, dim)
        return Transpose(Take(source.source, inner, index), source.dim0, source.dim1)
    if isinstance(source, Stack) and source.dim != dim:
        return Stack(tuple(Take(part, dim - (source.dim < dim), index) for part in source.parts), source.dim)
    if isinstance(source, Concat) and source.dim != dim:
        return Concat(tuple(Take(part, dim, index) for part in source.parts), source.dim)
    if isinstance(source, Concat):
        begin, parts = 0, []
        for part in source.parts:
            end = begin + part.shape(shapes)[dim]
            own = tuple(place - begin for place in index[begin:end])
            if sorted(own) != list(range(end - begin)):
                return expression
            parts.append(Take(part, dim, own))
            begin = end
        return Concat(tuple(parts), dim)
    return expression

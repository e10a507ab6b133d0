"""New safetensors files over a checkpoint: planned from expressions, then computed piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import isfinite, prod
from pathlib import Path
from typing import TYPE_CHECKING

from rewriter.common.errors import RewriterError
from rewriter.weights.checkpoint import FLOATS, TORCH_DTYPES, Checkpoint, mixed_dtypes, torch_dtype
from rewriter.weights.expressions import Expression, Slice, evaluate, is_computed
from rewriter.weights.finite import Pieces, Watched, check_finite, first_broken, not_finite
from rewriter.weights.header import BITS, encode_header

if TYPE_CHECKING:
    import torch

MADE = 16 << 20  # bytes of a file that are computed at a time
READ = 64 << 20  # bytes of the checkpoint that are read for them, at most


@dataclass(frozen=True)
class ShardPlan:
    """A safetensors file to be written: its tensors by name, each an expression and a dtype (None: as stored)."""

    path: Path
    tensors: Mapping[str, tuple[Expression, torch.dtype | None]]
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of a shard; `dtype` as safetensors calls it."""

    name: str
    expression: Expression
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * BITS[self.dtype] // 8


def plan_bytes(checkpoint: Checkpoint, plans: Sequence[ShardPlan]) -> int:
    """Bytes of data that the plans will write, headers not counted. Raises RewriterError as `convert_files` does."""
    return sum(item.nbytes for plan in plans for item in planned_tensors(checkpoint, plan))


def planned_tensors(checkpoint: Checkpoint, plan: ShardPlan) -> list[PlannedTensor]:
    """The tensors of a shard, in the order of its data: by element size, so that all stay aligned, then as stored.

    Raises RewriterError for expressions and dtypes that do not fit the checkpoint.
    """
    names = {name: dtype for dtype, name in TORCH_DTYPES.items()}
    order = sorted(checkpoint.tensors, key=lambda name: -BITS[checkpoint.tensors[name].dtype])
    places = dict(zip(order, accumulate((checkpoint.tensors[name].nbytes for name in order), initial=0), strict=False))
    spans: dict[str, tuple[int, int]] = {}  # of each tensor's first source among all of the checkpoint
    result = []
    for name, (expression, target) in plan.tensors.items():
        shape = expression.shape(checkpoint.shapes)
        stored = expression.dtypes(checkpoint.dtypes)
        if target is None and len(stored) > 1:
            raise mixed_dtypes(checkpoint, expression)
        dtype = next(iter(stored)) if target is None else names[str(target).removeprefix("torch.")]
        for source_dtype in stored - {dtype}:
            if not {source_dtype, dtype} <= FLOATS:
                raise RewriterError(
                    f"{name}: {source_dtype} cannot become {dtype}: only floating-point weights are converted."
                )
        if any(BITS[kind] % 8 for kind in stored):
            raise RewriterError(
                f"{name}: packed dtype {dtype} cannot be sharded. Start from the checkpoint before quantisation."
            )
        first = min(expression.tensors(), key=places.__getitem__)
        spans[name] = places[first], checkpoint.info(first).nbytes
        result.append(PlannedTensor(name, expression, shape, dtype))
    return sorted(result, key=lambda item: (-BITS[item.dtype], spans[item.name]))


def shard_pieces(
    checkpoint: Checkpoint, items: Sequence[PlannedTensor], metadata: Mapping[str, str], watched: Watched
) -> Pieces:
    """The bytes of a shard. What is read of the checkpoint leaves memory with each piece.

    Raises RewriterError for the first number that is not finite of a tensor made of `watched` ones: where the
    checkpoint holds it.
    """
    import torch

    yield memoryview(encode_header({item.name: (item.dtype, item.shape, item.nbytes) for item in items}, metadata))
    for item in items:
        looks = not watched.keys().isdisjoint(item.expression.tensors())
        source = sum(checkpoint.info(name).nbytes for name in {*item.expression.tensors()})
        limit = min(MADE, READ * item.nbytes // max(source, 1)) * 8 // BITS[item.dtype]
        done = 0
        for part in _parts(item.expression, item.shape, limit):
            values = _values(checkpoint, part, item.dtype)
            if looks and (place := first_broken(values)) is not None:
                value = float(checkpoint.evaluate(part).reshape(-1)[place])
                raise _beyond(checkpoint, item, done + place, value, watched)
            yield memoryview(values.view(torch.uint8).numpy())  # type: ignore[arg-type]
            done += values.numel()
            checkpoint.release()


def _parts(expression: Expression, shape: tuple[int, ...], limit: int, dim: int = 0) -> Iterator[Expression]:
    """Consecutive parts of a row-major tensor of at most `limit` elements; its sizes before `dim` are 1."""
    if dim == len(shape) or prod(shape[dim:]) <= limit:
        yield expression
        return
    row = prod(shape[dim + 1 :])
    step = max(1, limit // row)
    for low in range(0, shape[dim], step):
        part = Slice(expression, dim, ((low, min(low + step, shape[dim])),))
        yield from _parts(part, shape, limit, dim + 1) if row > limit else (part,)


def _values(checkpoint: Checkpoint, expression: Expression, dtype: str) -> torch.Tensor:
    """The elements of an expression, one after the other."""
    import torch

    moved = not is_computed(expression) and expression.dtypes(checkpoint.dtypes) == {dtype}
    width = getattr(torch, {8: "uint8", 16: "int16", 32: "int32", 64: "int64"}[BITS[dtype]])

    def read(name: str) -> torch.Tensor:
        # As integers where elements only move: torch does not join and index every dtype.
        return checkpoint.read(name).view(width) if moved else checkpoint.read(name)

    values = evaluate(expression.narrowed(checkpoint.shapes), read)
    values = values if moved else values.to(torch_dtype(dtype, "result"))
    return values.contiguous().reshape(-1).view(torch_dtype(dtype, "result"))


def _beyond(checkpoint: Checkpoint, item: PlannedTensor, element: int, value: float, watched: Watched) -> RewriterError:
    """The error for a number that is not finite, or not any more in the dtype that is written. Raises the checkpoint's
    own, where a `watched` tensor that it is made of is not finite there."""
    file = checkpoint.info(next(item.expression.tensors())).file
    if not isfinite(value):
        check_finite(checkpoint, {name: watched[name] for name in item.expression.tensors() if name in watched})
        return not_finite(file, item.name, element, item.shape, value)
    import torch

    most = torch.finfo(torch_dtype(item.dtype, item.name)).max
    place = [int(index) for index in torch.unravel_index(torch.tensor(element), item.shape)]
    return RewriterError(
        f"{file}: {item.name}{place} is {value:g}, and {item.dtype} holds at most {most:g}. Write another dtype "
        "(--dtype bf16 or fp32)"
    )

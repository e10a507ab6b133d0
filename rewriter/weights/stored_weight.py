"""Weights that stay as they are stored, FP8 or MXFP4, and are dequantized wherever something computes with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from rewriter.kernels.stored_weights import dequantized
from rewriter.weights.expressions import Concat, Dequantized, Expression, Slice, Stack, Transpose, evaluate

MOST = 0.55  # of bf16's bytes: more is not worth dequantizing at every use
Read = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class Stored:
    """Codes and scales of "fp8" (as many dimensions each, `numbers` elements per scale), or of "mxfp4", of which
    `transposed` says that the last two dimensions of what they stand for are exchanged."""

    scheme: str
    parts: tuple[torch.Tensor, ...]
    numbers: tuple[int, ...]
    transposed: bool = False

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.parts)

    @property
    def shape(self) -> tuple[int, ...]:
        codes = self.parts[0]
        if self.scheme == "fp8":
            return tuple(codes.shape)
        shape = (*codes.shape[:-2], 2 * codes.shape[-2] * codes.shape[-1])
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """The tensor that it stands for; scales are multiplied in fp32."""
        dequantized_values = dequantized(self.scheme, self.parts, self.numbers, dtype)
        return dequantized_values.transpose(-1, -2) if self.transposed else dequantized_values

    def moved(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Stored:
        return replace(self, parts=tuple(map(change, self.parts)))


def stored(expression: Expression, read: Read) -> Stored | None:
    """A tensor without dequantizing it; None where it is stored otherwise, or in parts that cannot be put together.

    Where a range ends inside a block of FP8, its blocks are divided into smaller ones of the same scale.
    """
    whole = _stored(expression, read)
    return whole if whole is not None and whole.nbytes <= MOST * 2 * prod(whole.shape) else None


def _stored(expression: Expression, read: Read) -> Stored | None:
    match expression:
        case Dequantized(scheme, parts, numbers) if scheme in ("fp8", "mxfp4"):
            codes, scales = (evaluate(part, read) for part in parts)
            if scheme == "fp8":
                lead = codes.dim() - len(numbers)
                scales = scales.reshape((1,) * lead + tuple(scales.shape))
                numbers = (*codes.shape[:lead], *numbers)
            return Stored(scheme, (codes, scales), numbers)
        case Transpose(source, dim0, dim1):
            inner = _stored(source, read)
            return None if inner is None else _transposed(inner, dim0, dim1)
        case Slice(source, dim, ranges):
            inner = _stored(source, read)
            pieces = [inner and _range(inner, dim, start, stop) for start, stop in ranges]
            return pieces[0] if len(pieces) == 1 else _joined(pieces, dim)
        case Concat(parts, dim):
            return _joined([_stored(part, read) for part in parts], dim)
        case Stack(parts, dim):
            return _joined(
                [piece and _unsqueezed(piece, dim) for piece in (_stored(part, read) for part in parts)], dim
            )
    return None


def _transposed(inner: Stored, dim0: int, dim1: int) -> Stored | None:
    last = (len(inner.shape) - 2, len(inner.shape) - 1)
    if inner.scheme == "mxfp4":
        return replace(inner, transposed=not inner.transposed) if tuple(sorted((dim0, dim1))) == last else None
    numbers = list(inner.numbers)
    numbers[dim0], numbers[dim1] = numbers[dim1], numbers[dim0]
    return replace(inner.moved(lambda part: part.transpose(dim0, dim1)), numbers=tuple(numbers))


def _range(inner: Stored, dim: int, start: int, stop: int) -> Stored | None:
    if inner.scheme == "fp8":
        codes, scales = inner.parts
        if scales.shape[dim] > 1:
            per = gcd(inner.numbers[dim], start, stop if stop < codes.shape[dim] else start)
            inner = _finer(inner, dim, per)
            scales = inner.parts[1].narrow(dim, start // per, -(-stop // per) - start // per)
        return replace(inner, parts=(codes.narrow(dim, start, stop - start), scales))
    axis = dim if not inner.transposed else {-1: -2, -2: -1}.get(dim - len(inner.shape), dim) % len(inner.shape)
    if axis < len(inner.shape) - 1:
        return inner.moved(lambda part: part.narrow(axis, start, stop - start))
    per = 2 * inner.parts[0].shape[-1]
    if start % per or stop % per:
        return None
    return inner.moved(lambda part: part.narrow(axis, start // per, (stop - start) // per))


def _finer(inner: Stored, dim: int, per: int) -> Stored:
    """With `per` elements per scale along `dim`, which divides their number now."""
    codes, scales = inner.parts
    before = codes.shape[dim] if scales.shape[dim] == 1 else inner.numbers[dim]
    count = -(-codes.shape[dim] // per)
    finer = scales.repeat_interleave(before // per, dim).narrow(dim, 0, count)
    return replace(inner, parts=(codes, finer), numbers=(*inner.numbers[:dim], per, *inner.numbers[dim + 1 :]))


def _unsqueezed(inner: Stored, dim: int) -> Stored | None:
    if inner.scheme != "fp8":
        return None
    numbers = (*inner.numbers[:dim], 1, *inner.numbers[dim:])
    return replace(inner.moved(lambda part: part.unsqueeze(dim)), numbers=numbers)


def _joined(pieces: Sequence[Stored | None], dim: int) -> Stored | None:
    """The pieces one after the other along `dim`, with the largest blocks that divide all of theirs."""
    parts = [piece for piece in pieces if piece is not None and piece.scheme == "fp8"]
    if len(parts) < len(pieces):
        return None
    for axis in range(len(parts[0].shape)):
        whole = all(piece.parts[1].shape[axis] == 1 for piece in parts)
        if axis != dim and whole:
            continue
        pers = [p.shape[axis] if p.parts[1].shape[axis] == 1 else p.numbers[axis] for p in parts]
        # what comes after a piece begins with a block too
        ends = [piece.shape[axis] for piece in parts[:-1]] if axis == dim else []
        parts = [_finer(piece, axis, gcd(*pers, *ends)) for piece in parts]
    scales = [piece.parts[1] for piece in parts]
    if len({piece.dtype for piece in scales}) > 1 or len({piece.parts[0].dtype for piece in parts}) > 1:
        return None
    return replace(parts[0], parts=(torch.cat([p.parts[0] for p in parts], dim), torch.cat(scales, dim)))


class StoredWeight(torch.Tensor):
    """A weight of `dtype` for everything that computes with it, of which only codes and scales are in memory.

    Moving it to a device, casting it, detaching it and choosing one expert keep it so; any other operator is given its
    values, made for that use. It is not trained.
    """

    stored: Stored

    @staticmethod
    def __new__(cls, stored: Stored, dtype: torch.dtype) -> StoredWeight:
        made: StoredWeight = torch.Tensor._make_wrapper_subclass(
            cls, stored.shape, dtype=dtype, device=stored.parts[0].device, requires_grad=False
        )
        made.stored = stored
        return made

    def values(self) -> torch.Tensor:
        """A plain tensor, made anew."""
        return self.stored.values(self.dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StoredWeight({self.stored.scheme}, {list(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        aten, kwargs, weight = torch.ops.aten, dict(kwargs or {}), args[0] if args else None
        if isinstance(weight, StoredWeight):
            kept = weight.stored
            if func is aten.detach.default:
                return StoredWeight(kept, weight.dtype)
            if func is aten._to_copy.default and kwargs.keys() <= {"dtype", "device", "non_blocking"}:
                device, blocking = kwargs.get("device") or weight.device, not kwargs.get("non_blocking", False)
                there = kept.moved(lambda part: part.to(device, non_blocking=not blocking))
                return StoredWeight(there, kwargs.get("dtype") or weight.dtype)
            if func is aten.select.int and args[1] == 0 and weight.dim() == 3:
                return StoredWeight(_chosen(kept, int(args[2])), weight.dtype)
        plain = tree_map_only(StoredWeight, StoredWeight.values, (args, kwargs))
        return func(*plain[0], **plain[1])


def _chosen(kept: Stored, index: int) -> Stored:
    """One of its first dimension."""
    index %= kept.shape[0]
    codes, scales = kept.parts
    at = index // kept.numbers[0] if kept.scheme == "fp8" and scales.shape[0] > 1 else min(index, scales.shape[0] - 1)
    return replace(kept, parts=(codes[index], scales[at]), numbers=kept.numbers[1:])

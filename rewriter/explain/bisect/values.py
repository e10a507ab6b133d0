"""Values that ranks hold, and whether they stand for one whole value: as copies, as parts of a sum, as slices."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rewriter.verify.comparison import relative_error

Ranks = tuple[torch.Tensor, ...]
"""One tensor per rank, or one that all ranks hold."""


def difference(actual: Ranks, expected: Ranks, *, partial: bool = True) -> float:
    """The relative error of `actual`, in the reading of it that fits best; infinite where none has the right shape.

    Both may hold one tensor for all ranks. Without `partial` ranks must hold the whole value. With it they may also
    hold summands of it, or slices along one dimension (each slice on several ranks where there are fewer than ranks).
    """
    if len(actual) == len(expected):
        found = max(_error(a, e) for a, e in zip(actual, expected, strict=True))
    elif len(expected) == 1:
        found = max(_error(a, expected[0]) for a in actual)
    else:
        found = max(_error(actual[0], e) for e in expected)
    if partial and found and len(actual) != len(expected):
        parts, whole = (actual, expected[0]) if len(expected) == 1 else (expected, actual[0])
        found = min([found, *(_error(value, whole) for value in _joined(parts, whole))])
    return found


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    if actual.shape != expected.shape and actual.numel() == expected.numel():
        actual = actual.reshape(expected.shape)  # tokens of all rows in one dimension, or in two
    if not actual.numel() or not expected.numel():
        return 0.0 if actual.shape == expected.shape else float("inf")
    if not expected.is_floating_point():
        return 0.0 if torch.equal(actual, expected.to(actual.dtype)) else float("inf")
    return relative_error(actual.float(), expected.float())


def _joined(parts: Sequence[torch.Tensor], whole: torch.Tensor) -> list[torch.Tensor]:
    """The values that the ranks' parts may stand for together."""
    first = parts[0]
    if any(part.shape != first.shape for part in parts) or first.ndim != whole.ndim:
        return [torch.cat(list(parts), dim) for dim in _uneven(parts, whole)]
    if first.shape == whole.shape:
        return [torch.stack(list(parts)).sum(0)] if first.is_floating_point() else []
    other = [d for d in range(first.ndim) if first.shape[d] != whole.shape[d]]
    if len(other) != 1:
        return []
    dim = other[0]
    slices, left = divmod(whole.shape[dim], first.shape[dim])
    if left or len(parts) % max(slices, 1) or not slices:
        return []
    return [torch.cat(list(parts[:: len(parts) // slices]), dim)]


def _uneven(parts: Sequence[torch.Tensor], whole: torch.Tensor) -> list[int]:
    """Dimensions along which slices of different sizes make a tensor of the shape of `whole`."""
    if any(part.ndim != whole.ndim for part in parts):
        return []
    dims = []
    for dim in range(whole.ndim):
        rest = [tuple(s for d, s in enumerate(t.shape) if d != dim) for t in (*parts, whole)]
        if len(set(rest)) == 1 and sum(part.shape[dim] for part in parts) == whole.shape[dim]:
            dims.append(dim)
    return dims


def reordered(actual: Ranks, expected: Ranks) -> bool:
    """Whether the elements are the same ones along one dimension, in another order."""
    if len(actual) != 1 or len(expected) != 1 or actual[0].shape != expected[0].shape:
        return False
    a, e = actual[0].float(), expected[0].float()
    return any(torch.equal(a.sort(dim).values, e.sort(dim).values) for dim in range(a.ndim))


def relation(actual: Ranks, expected: Ranks, limit: float) -> str:
    """In words, how a wrong value relates to the right one; empty where nothing simple does."""
    if len(actual) > 1 and len(expected) == 1:
        return "ranks hold different values" if any(not torch.equal(v, actual[0]) for v in actual[1:]) else ""
    a, e = actual[0].double(), expected[0].double()
    for values, which in ((a, ""), (e, "expected ")):
        if count := int((~values.isfinite()).sum()):
            return f"{count} of {values.numel()} {which}elements are not finite"
    if a.shape != e.shape or not bool(e.abs().max() > 0):
        return ""
    factor = float((a * e).sum() / (e * e).sum())
    if relative_error(a, factor * e) <= limit and abs(factor - 1) > limit:
        return "it is zero" if abs(factor) < limit else f"it is {factor:.6g} times what it should be"
    return "its elements are in another order" if reordered((a,), (e,)) else ""

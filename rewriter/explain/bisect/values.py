"""Values at points of a model, on all ranks, and the first point at which two computations of them differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import torch

from rewriter.check.comparison import relative_error

Ranks = tuple[torch.Tensor, ...]
"""One tensor per rank, or one that all ranks hold."""
Point = tuple[str, str]
"""("given" or "returned", path of a module), ("stream", number of the value), or LOGITS."""
Values = Mapping[Point, Ranks]
"""Values by point, in the order of execution; of a module the first tensor."""
LOGITS: Point = ("logits", "")


def merged(values: Sequence[torch.Tensor]) -> Ranks:
    """The values of ranks; one tensor where all hold the same."""
    return (values[0],) if all(torch.equal(v, values[0]) for v in values[1:]) else tuple(values)


def first_parting(ours: Values, theirs: Values, limit: float) -> tuple[Point, float] | None:
    """The first point of `ours` that differs from `theirs` by more than `limit`, with the error; None: none does.

    Where none exceeds the limit by itself, points are compared with a tenth and a hundredth of it: what is small at
    first may grow on its way to the logits. Values of another shape are not the same value, and not compared.
    """
    for factor in (1.0, 0.1, 0.01):
        for point, actual in ours.items():
            if point not in theirs:
                continue
            error = difference(actual, theirs[point], partial=point[0] == "returned")
            shape = error == float("inf") and all(bool(v.isfinite().all()) for v in actual)
            if error > limit * factor and (not shape or point == LOGITS):
                return point, error
    return None


def difference(actual: Ranks, expected: Ranks, *, partial: bool = True) -> float:
    """The relative error of `actual`, in the reading of it that fits best; infinite where none has the right shape.

    Both may hold one tensor for all ranks. Without `partial` ranks must hold the whole value. With it they may also
    hold summands of it, or slices along one dimension (each slice on several ranks where there are fewer than ranks).
    """
    same = len(actual) == len(expected)
    error = max(_error(a, e) for a, e in (zip(actual, expected, strict=True) if same else product(actual, expected)))
    if partial and error and not same:
        parts, whole = (actual, expected[0]) if len(expected) == 1 else (expected, actual[0])
        error = min([error, *(_error(value, whole) for value in _joined(parts, whole))])
    return error


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    if actual.shape != expected.shape and actual.numel() == expected.numel():
        actual = actual.reshape(expected.shape)  # tokens of all rows in one dimension, or in two
    if not actual.numel() or not expected.numel():
        return 0.0 if actual.shape == expected.shape else float("inf")
    if not expected.is_floating_point():
        return 0.0 if torch.equal(actual, expected.to(actual.dtype)) else float("inf")
    return relative_error(actual.float(), expected.float())


def _joined(parts: Ranks, whole: torch.Tensor) -> Iterator[torch.Tensor]:
    """The values of the shape of `whole` that the ranks' parts may stand for together: their sum, or slices of it."""
    if all(part.shape == whole.shape for part in parts):
        if whole.is_floating_point():
            yield torch.stack(parts).sum(0)
        return
    if any(part.ndim != whole.ndim for part in parts):
        return
    for copies in (n for n in range(1, len(parts)) if len(parts) % n == 0):
        slices = parts[::copies]
        for dim in range(whole.ndim):
            rest = {tuple(size for d, size in enumerate(t.shape) if d != dim) for t in (*slices, whole)}
            if len(rest) == 1 and sum(part.shape[dim] for part in slices) == whole.shape[dim]:
                yield torch.cat(slices, dim)


def reordered(actual: Ranks, expected: Ranks, limit: float) -> bool:
    """Equality within `limit` of the elements along one dimension in any order: heads that a pass permuted."""
    if len(actual) != 1 or len(expected) != 1 or actual[0].shape != expected[0].shape:
        return False
    a, e = actual[0], expected[0]
    return any(_error(a.sort(dim).values, e.sort(dim).values) <= limit for dim in range(a.ndim))

"""Two checkpoints, tensor by tensor: same, renamed, changed with norms. One tensor of each is in memory at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch

from rewriter.explain.diff.differences import TensorDifference, TensorDifferences
from rewriter.weights import Checkpoint
from rewriter.weights.expressions import Tensor

_CHUNK = 1 << 24  # elements


def tensors_between(
    before: Checkpoint, after: Checkpoint, progress: Callable[..., None] = lambda *_: None
) -> TensorDifferences:
    """Differences of all tensors. Raises RewriterError where a file cannot be read."""
    ours, theirs = before.tensors, after.tensors
    same = same_bytes = 0
    changed: list[TensorDifference] = []
    both = [name for name in ours if name in theirs]
    for done, name in enumerate(both):
        progress("comparing tensors", done, len(both))
        a, b = before.evaluate(Tensor(name)), after.evaluate(Tensor(name))
        difference = tensor_difference(name, a, b)
        if difference is None:
            same, same_bytes = same + 1, same_bytes + a.nbytes
        else:
            changed.append(difference)
    removed, added = [n for n in ours if n not in theirs], [n for n in theirs if n not in ours]
    renamed = _renamed(before, removed, after, added)
    gone, new = {a for a, _ in renamed}, {b for _, b in renamed}
    return TensorDifferences(
        same, same_bytes, renamed, changed, [n for n in removed if n not in gone], [n for n in added if n not in new]
    )


def tensor_difference(name: str, a: torch.Tensor, b: torch.Tensor) -> TensorDifference | None:
    """The change of a tensor from `a` to `b`; None where every bit is the same."""
    if a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b)):
        return None
    what = "values"
    if a.shape != b.shape:
        what = "another shape"
    elif a.dtype != b.dtype:
        what = "another dtype" if torch.equal(a.to(b.dtype), b) else "values and dtype"
    elif any(torch.equal(a.float().sort(dim).values, b.float().sort(dim).values) for dim in range(a.ndim)):
        what = "the same values in another order"
    change = None if a.shape != b.shape else _norm(a, b)
    return TensorDifference(name, _kind(a), _kind(b), _norm(a), _norm(b), change, what)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _norm(a: torch.Tensor, b: torch.Tensor | None = None) -> float | None:
    """‖a‖, or ‖b − a‖, summed in fp64; None of numbers that are no floating-point ones."""
    if not a.is_floating_point() or (b is not None and not b.is_floating_point()):
        return None
    flat, other = a.reshape(-1), None if b is None else b.reshape(-1)
    total = 0.0
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].double()
        if other is not None:
            part = other[start : start + _CHUNK].double() - part
        total += float(part.pow(2).sum())
    return total**0.5


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _renamed(before: Checkpoint, removed: list[str], after: Checkpoint, added: list[str]) -> list[tuple[str, str]]:
    """Pairs of equal bytes and other names."""
    by_hash: dict[str, list[str]] = {}
    for name in added if removed else []:
        by_hash.setdefault(_hash(after.evaluate(Tensor(name))), []).append(name)
    pairs = []
    for name in removed if added else []:
        if same := by_hash.get(_hash(before.evaluate(Tensor(name)))):
            pairs.append((name, same.pop(0)))
    return pairs


def _hash(tensor: torch.Tensor) -> str:
    return hashlib.sha256(_kind(tensor).encode() + _bytes(tensor).numpy().tobytes()).hexdigest()

"""Two checkpoints, tensor by tensor: same, renamed, changed with norms. One tensor of each is in memory at a time."""

from __future__ import annotations

import hashlib

import torch

from rewriter.common.run_context import ProgressCall, silent
from rewriter.explain.diff.differences import TensorDifference, TensorDifferences
from rewriter.weights import Checkpoint
from rewriter.weights.expressions import Tensor

_CHUNK = 1 << 24  # elements


def tensors_between(before: Checkpoint, after: Checkpoint, progress: ProgressCall = silent) -> TensorDifferences:
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
    renamed = []
    if removed and added:
        hashes = {name: _hash(after.evaluate(Tensor(name))) for name in added}
        for name in list(removed):
            own = _hash(before.evaluate(Tensor(name)))
            if (other := next((n for n in added if hashes[n] == own), None)) is not None:
                renamed.append((name, other))
                removed.remove(name)
                added.remove(other)
    return TensorDifferences(same, same_bytes, renamed, changed, removed, added)


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
    total = 0.0
    for start in range(0, a.numel(), _CHUNK):
        part, other = (t.reshape(-1)[start : start + _CHUNK].double() for t in (a, a if b is None else b))
        total += float((part if b is None else other - part).pow(2).sum())
    return total**0.5


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _hash(tensor: torch.Tensor) -> str:
    return hashlib.sha256(_kind(tensor).encode() + _bytes(tensor).numpy().tobytes()).hexdigest()

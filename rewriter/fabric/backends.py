"""Which library's collective a server takes: of those that were measured, the fastest for the kind and the size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rewriter.fabric.calls import Call, Delay, DelayModel

BEST, FUSED = "best", "fused"
"""As libraries: the fastest of all, and the all-reduce that adds the residual and norms the sum."""

_NORM_SECONDS = 2e-6  # what a kernel that adds and norms takes at least, measured ones of one row (kernel_tables)


@dataclass(frozen=True)
class FusedSum:
    """An all-reduce that adds the residual and norms the sum in the same kernel.

    It takes `added_seconds` more than the all-reduce of `library`. `most_bytes`: the largest message that servers give
    it, by ranks; for other numbers of ranks they have none.
    """

    library: str
    added_seconds: float
    most_bytes: Mapping[int, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Fused:
    """`model` is that of the fused sum's library; what may not be fused is answered by `other`."""

    sum: FusedSum
    model: DelayModel
    other: DelayModel

    def delay(self, call: Call) -> Delay:
        if not self.takes(call):
            return self.other.delay(call)
        found = self.model.delay(call)
        return replace(found, seconds=found.seconds + self.sum.added_seconds, normed=True, library=FUSED)

    def takes(self, call: Call) -> bool:
        fits = call.nbytes <= self.sum.most_bytes.get(call.size, 0)
        return call.kind == "all_reduce" and call.norm and fits


@dataclass(frozen=True)
class Best:
    """The fastest of `models`, by library. A fused sum saves the kernel after it, too."""

    models: Mapping[str, DelayModel] = field(hash=False)

    def delay(self, call: Call) -> Delay:
        found = {
            name: replace(model.delay(call), library=name)
            for name, model in self.models.items()
            if not isinstance(model, Fused) or model.takes(call)
        }
        return min(found.values(), key=lambda d: d.seconds - (_NORM_SECONDS if d.normed else 0.0))

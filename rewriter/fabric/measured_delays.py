"""Models of collectives as they were measured: of one library, of the fastest of several, of a sum that norms.

What was not measured is in proportion to what was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rewriter.common.errors import RewriterError
from rewriter.fabric.alpha_beta import BY_FORMULA, AlphaBeta, split
from rewriter.fabric.calls import KINDS, NO_DELAY, Call, Delay, DelayModel, Kind
from rewriter.fabric.links import GroupPlacement
from rewriter.fabric.tables import Curve, Table

BEST, FUSED = "best", "fused"
"""As libraries: the fastest of all, and the all-reduce that adds the residual and norms the sum."""

_NORM_SECONDS = 2e-6  # what a kernel that adds and norms takes at least, measured ones of one row (kernel_tables)
# What a collective that was not measured moves most like.
_ALIKE: dict[Kind, tuple[Kind, ...]] = {
    "all_reduce": ("reduce_scatter", "all_gather"),
    "all_gather": ("reduce_scatter", "all_reduce"),
    "reduce_scatter": ("all_gather", "all_reduce"),
    "all_to_all": ("all_gather", "reduce_scatter"),
    "broadcast": ("all_gather", "all_reduce"),
    "reduce": ("reduce_scatter", "all_reduce"),
    "gather": ("all_gather", "all_to_all"),
    "scatter": ("reduce_scatter", "all_to_all"),
    "send": ("all_to_all", "all_gather"),
    "barrier": ("all_reduce",),
}


@dataclass(frozen=True)
class MeasuredDelays:
    """The first of `tables` that has a collective answers: a library that has only an all-reduce leaves the
    others to NCCL.

    Other numbers of ranks than were measured, and collectives that were not, take the nearest measurement times the
    ratio of both by the α-β model of the same links (`formula`); the delay's note says so. The transfer is what a
    message takes beyond the smallest one.

    A group across nodes of several ranks, if it was not measured itself, does the collective in each node and, with
    each rank's share, between nodes by formula. Latencies add up; transfers overlap:

        seconds = latency inside + latency between + max(transfer inside, transfer between)

    Two nodes of 8 H100 with 8 adapters of 400 Gb/s reach by this 461 GB/s (all-reduce bus bandwidth of 256 MB), where
    about 470 are reported as expected (nccl-tests #290, NCCL #2409).
    """

    tables: tuple[Table, ...]
    formula: AlphaBeta

    def delay(self, call: Call) -> Delay:
        """Raises RewriterError for a group that spans nodes where no link joins them."""
        if call.size < 2:
            return NO_DELAY
        formula = self.formula
        placement, links = formula.placed(call)
        if placement.nodes > 1 and formula.node > 1 and not self._covers(call):
            return self._across(call, placement, links)
        curve, like = self._nearest(call)
        ratio, note = 1.0, ""
        if (like.kind, like.size) != (call.kind, call.size):
            asked, known = formula.delay(call).seconds, formula.delay(like).seconds
            ratio = asked / known if known > 0 else 1.0
            note = (
                f"{call.kind} among {call.size} ranks: from the measured {like.kind} among {like.size}, in proportion "
                "to formulas (α-β)"
            )
        seconds = curve.seconds(like.nbytes) * ratio
        transfer = max(0.0, seconds - curve.latency * ratio)
        taken, hindrance = curve.cpu_seconds(like.nbytes) * ratio, curve.hindrance(like.nbytes) * ratio
        return Delay(seconds, transfer, links, taken, hindrance=hindrance, note=note)

    def _across(self, call: Call, placement: GroupPlacement, links: tuple[str, ...]) -> Delay:
        near, far = split(call, placement.together, placement.nodes)
        if call.kind == "send":
            near, far = Call("send", 0, range(1)), Call("send", call.nbytes, range(2))
        assert self.formula.between is not None  # `placed` refused it
        inside, between = self.delay(near), AlphaBeta(self.formula.between, self.formula.between).delay(far)
        transfer = max(inside.transfer, between.transfer)
        return Delay(
            inside.seconds - inside.transfer + between.seconds - between.transfer + transfer,
            transfer,
            links,
            cpu_seconds=inside.cpu_seconds,
            hindrance=inside.hindrance,
            note=f"{call.kind} across {placement.nodes} nodes: the network {BY_FORMULA}, not measured",
        )

    def _covers(self, call: Call) -> bool:
        """True for a group that was measured across nodes: it is too large for one."""
        return call.size > self.formula.node and any((call.kind, call.size) in table.curves for table in self.tables)

    def _nearest(self, call: Call) -> tuple[Curve, Call]:
        """The curve that answers, and the call that it answers."""
        for kind in dict.fromkeys((call.kind, *_ALIKE[call.kind], *KINDS)):
            for table in self.tables:
                sizes = [ranks for known, ranks in table.curves if known == kind]
                if sizes:
                    ranks = min(sizes, key=lambda size: (abs(math.log(size / call.size)), size))
                    like = replace(call, kind=kind, ranks=call.ranks if ranks == call.size else range(ranks))
                    return table.curves[kind, ranks], like
        raise RewriterError("a model of measurements without a table: name at least one.")


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
class FusedDelays:
    """`model` is that of the fused sum's library, and answers alone what may not be fused."""

    sum: FusedSum
    model: DelayModel

    def delay(self, call: Call) -> Delay:
        delay = self.model.delay(call)
        if not self.takes(call):
            return delay
        return replace(delay, seconds=delay.seconds + self.sum.added_seconds, normed=True, library=FUSED)

    def takes(self, call: Call) -> bool:
        fits = call.nbytes <= self.sum.most_bytes.get(call.size, 0)
        return call.kind == "all_reduce" and call.norm and fits


@dataclass(frozen=True)
class Best:
    """The fastest of `models`, by library. A fused sum saves the kernel after it, too. `most_bytes`: the largest
    message that a library is given, of those that have a limit."""

    models: Mapping[str, DelayModel] = field(hash=False)
    most_bytes: Mapping[str, int] = field(default_factory=dict, hash=False)

    def delay(self, call: Call) -> Delay:
        delays = [
            replace(model.delay(call), library=name)
            for name, model in self.models.items()
            if (not isinstance(model, FusedDelays) or model.takes(call))
            and call.nbytes <= self.most_bytes.get(name, call.nbytes)
        ]
        return min(delays, key=lambda d: d.seconds - (_NORM_SECONDS if d.normed else 0.0))

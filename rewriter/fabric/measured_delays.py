"""Collectives as they were measured; what was not measured, in proportion to what was."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rewriter.common.errors import RewriterError
from rewriter.fabric.alpha_beta import AlphaBeta
from rewriter.fabric.calls import KINDS, Call, Kind
from rewriter.fabric.curves import Curve
from rewriter.fabric.delays import Delay
from rewriter.fabric.rank_groups import occupied, place, refuse_spanning
from rewriter.fabric.shipped_tables import Table

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
class Measured:
    """The first of `tables` that has a collective answers: a library that has only an all-reduce of its own leaves the
    others to NCCL.

    Other numbers of ranks than were measured, and collectives that were not, take the nearest measurement times the
    ratio of both by the α-β model of the same links (`formula`); the delay's note says so. The transfer is what a
    message takes beyond the smallest one.
    """

    tables: tuple[Table, ...]
    formula: AlphaBeta

    def delay(self, call: Call) -> Delay:
        """Raises RewriterError for a group that spans nodes where no link joins them."""
        if call.size < 2:
            return Delay(0.0, 0.0, ())
        formula, placement = self.formula, place(call.ranks, self.formula.node)
        refuse_spanning(call, placement, formula.node, formula.between)
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
        links = occupied(placement, formula.node, formula.inside, formula.between)
        taken, hindrance = curve.cpu_seconds(like.nbytes) * ratio, curve.hindrance(like.nbytes) * ratio
        return Delay(seconds, transfer, links, taken, hindrance=hindrance, note=note)

    def covers(self, call: Call) -> bool:
        """Whether such a group was measured across nodes: it is too large for one."""
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


def table_errors(tables: Sequence[Table]) -> tuple[float, ...]:
    """The leave-one-out errors of all curves of `tables`."""
    return tuple(error for table in tables for errors in table.errors.values() for error in errors)

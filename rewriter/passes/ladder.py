"""Ladder Residual: every block of the chosen layers reads the stream as it was one block earlier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from rewriter.common.errors import RewriterError
from rewriter.ir import Program
from rewriter.ir.marks import Mode, mark
from rewriter.ir.residual import stream_values
from rewriter.passes.base import Effect, LayerModes, Reducing, Scope, record
from rewriter.passes.phases import PhasedPass
from rewriter.passes.residual_rewrite import check_ranks, chosen_blocks, layers_passed_over, settle_reads
from rewriter.passes.selection import Selection, resolve

LADDER = Mode("ladder", "reads the residual stream one block late", "Ladder", "earlier")
OWN_PARTIAL = Mode(
    "own_partial",
    "reads the residual stream one block late, with the rank's own part of the block between",
    "OwnPartialLadder",
    "earlier_and_own",
)


@dataclass(frozen=True)
class Ladder(PhasedPass):
    """x_{i+1} = h_{i+1}(x_{i-1}) + x_i (Ladder Residual, arXiv 2501.06589, Eq. 2 and Alg. 1).

    `layers` selects decoder layers. In a selected layer each block reads the stream value before the one it would read,
    so that the all-reduce of the block in between hides behind it; the very first block has nothing to skip. Thereby a
    first selected layer reads the post-attention residual of the layer before (standard → ladder), and a layer after
    the selection reads the full sum (ladder → standard drains).

    `variant` "paper": the function does not depend on the number of ranks. "own_partial" (after Delayed Tensor
    Parallelism, arXiv 2609.13846): block i+1 reads x_{i-1} + f_{i,r}, with this rank's own part of what block i writes;
    the stream gets AR(f_i) when it arrives, and the own part is not stored. Closer to the original, bound to the number
    of ranks.

    Raises RewriterError when the model has no residual stream, a selected layer has no block, or "own_partial" is asked
    for on one rank.
    """

    layers: Selection = "all"
    variant: Literal["paper", "own_partial"] = "paper"

    name: ClassVar[str] = "ladder"
    effect: ClassVar[Effect] = "approximating"

    @property
    def scope(self) -> Scope:
        return "model" if self.variant == "paper" else "per_rank"

    def apply(self, program: Program) -> Program:
        if self.variant == "own_partial":
            check_ranks(program, "ladder with variant own_partial")
        blocks = chosen_blocks(program, self.name, self.layers)
        if blocks[-1].index == 0:
            raise RewriterError("ladder: only the first block of the model is selected, which has nothing to skip")
        graph, env = program.edit()
        for block in blocks:
            mark(env[block.add], mode=LADDER if self.variant == "paper" else OWN_PARTIAL)
        rewired = settle_reads(program, graph, self.name)
        late = len(blocks) - (blocks[0].index == 0)
        summary = f"{late} of {len(stream_values(graph)) - 1} blocks read the stream one block earlier"
        if self.variant == "own_partial":
            summary += ", with this rank's own partial sum of the block between"
        return record(rewired, self, summary, layers_passed_over(program, blocks, self.layers))

    def reference_modes(self, count: int, reducing: Reducing) -> LayerModes:
        mode = "ladder" if self.variant == "paper" else "own_partial"
        return {layer: {"mode": mode} for layer in resolve(self.layers, count)}

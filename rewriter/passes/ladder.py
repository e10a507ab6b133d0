"""Ladder Residual: every block of the chosen layers reads the stream as it was one block earlier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from rewriter.common.errors import RewriterError
from rewriter.ir import Program
from rewriter.ir.coefficients import coefficients_of
from rewriter.ir.marks import Mode, mark
from rewriter.ir.residual import stream_values
from rewriter.passes.base import Effect, LayerModes, Reducing, Scope, record
from rewriter.passes.phases import PhasedPass
from rewriter.passes.residual_rewrite import check_ranks, chosen_blocks, layers_passed_over, settle_reads
from rewriter.passes.selection import Selection, resolve

LADDER = Mode("ladder", "reads the residual stream one block late", "Ladder", reads="earlier")
OWN_PARTIAL = Mode(
    "own_partial",
    "reads the residual stream one block late, with the rank's own part of the block between",
    "OwnPartialLadder",
    reads="earlier_and_own",
)
LATE_COEFFICIENTS = Mode(
    "ladder_late_coefficients",
    "reads the residual stream one block late, and computes from that also what it mixes its streams and scales what "
    "it adds by",
    "LateCoefficientsLadder",
    reads="earlier",
    coefficients="earlier",
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

    `coefficients` is about streams that blocks mix (hyper-connections), X' = K(X) + b(X) ⊗ F: "fresh" computes K's and
    b's coefficients from the newest value X, "late" from the value R that the block reads, and applies them to X. Where
    they are constants, and where K is a norm, both are the same.

    Raises RewriterError when the model has no residual stream, a selected layer has no block, "own_partial" is asked
    for on one rank, or "late" together with "own_partial".
    """

    layers: Selection = "all"
    variant: Literal["paper", "own_partial"] = "paper"
    coefficients: Literal["fresh", "late"] = "fresh"

    name: ClassVar[str] = "ladder"
    effect: ClassVar[Effect] = "approximating"

    @property
    def scope(self) -> Scope:
        return "model" if self.variant == "paper" else "per_rank"

    def apply(self, program: Program) -> Program:
        if self.variant == "own_partial":
            if self.coefficients == "late":
                raise RewriterError(
                    "ladder: coefficients: late computes them from what a block reads, with variant: own_partial "
                    "another value on each rank, but ranks mix their streams alike. Use coefficients: fresh, or "
                    "variant: paper"
                )
            check_ranks(program, "ladder with variant own_partial")
        blocks = chosen_blocks(program, self.name, self.layers)
        if blocks[-1].index == 0:
            raise RewriterError("ladder: only the first block of the model is selected, which has nothing to skip")
        graph, env = program.edit()
        mixing = {b.index for b in blocks if coefficients_of(b)} if self.coefficients == "late" else set()
        for block in blocks:
            plain = LATE_COEFFICIENTS if block.index in mixing else LADDER
            mark(env[block.add], mode=plain if self.variant == "paper" else OWN_PARTIAL)
        rewired = settle_reads(program, graph, self.name)
        late = len(blocks) - (blocks[0].index == 0)
        summary = f"{late} of {len(stream_values(graph)) - 1} blocks read the stream one block earlier"
        if self.variant == "own_partial":
            summary += ", with this rank's own partial sum of the block between"
        if mixing:
            summary += f"; {len(mixing - {0})} compute their coefficients from that value"
        notes = layers_passed_over(program, blocks, self.layers)
        if self.coefficients == "late" and len(mixing) < len(blocks):
            notes += (
                f"coefficients: late changes nothing in {len(blocks) - len(mixing)} of {len(blocks)} blocks: they "
                "carry the stream on as it is, normed or times constants, and scale what they add by constants",
            )
        return record(rewired, self, summary, notes)

    def reference_modes(self, count: int, reducing: Reducing) -> LayerModes:
        mode = "ladder" if self.variant == "paper" else "own_partial"
        return {layer: {"mode": mode, "coefficients": self.coefficients} for layer in resolve(self.layers, count)}

"""Ladder Residual: every block of the chosen layers reads the stream as it was one block earlier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rewriter.analysis.residual import annotate, residual_blocks, stream_values
from rewriter.errors import RewriterError
from rewriter.passes.base import Kind, Scope, record
from rewriter.program import Program
from rewriter.selection import Selection, resolve


@dataclass(frozen=True)
class Ladder:
    """x_{i+1} = h_{i+1}(x_{i-1}) + x_i (Ladder Residual, arXiv 2501.06589, Eq. 2 and Alg. 1).

    `layers` selects decoder layers. In a selected layer each block reads the stream value before the one it would read,
    so that the all-reduce of the block in between hides behind it; the very first block has nothing to skip. Thereby a
    first selected layer reads the post-attention residual of the layer before (standard → ladder), and a layer after
    the selection reads the full sum (ladder → standard drains). The function does not depend on the number of ranks.

    Raises RewriterError when the model has no residual stream or a selected layer has no block.
    """

    layers: Selection = "all"

    name: ClassVar[str] = "ladder"
    kind: ClassVar[Kind] = "approximating"
    scope: ClassVar[Scope] = "model"

    def apply(self, program: Program) -> Program:
        chosen = set(resolve(self.layers, program.source.num_layers))
        if not chosen:
            raise RewriterError(f"ladder: layers={self.layers!r} selects no layer of {program.source.num_layers}")
        blocks = residual_blocks(program)
        if not blocks:
            annotate(program.edit()[0], program.source.num_layers)  # raises, saying where the stream ends
            raise RewriterError("ladder: the model has no residual stream")
        graph, env = program.edit()
        stream = stream_values(program.graph)
        rerouted = 0
        for block in blocks:
            if block.layer not in chosen:
                continue
            if block.reads != (block.index,):
                raise RewriterError(
                    f"ladder: block {block.path} reads stream values {block.reads}; it was rewired before"
                )
            if block.index == 0:
                continue
            fresh, stale = env[stream[block.index]], env[stream[block.index - 1]]
            for node in block.branch:
                env[node].replace_input_with(fresh, stale)
            rerouted += 1
        lacking = chosen - {b.layer for b in blocks}
        if lacking:
            raise RewriterError(f"ladder: layer {min(lacking)} has no residual block")
        if not rerouted:
            raise RewriterError("ladder: only the first block of the model is selected, which has nothing to skip")
        summary = f"{rerouted} of {len(blocks)} blocks read the stream one block earlier"
        return record(program, self, summary, graph=graph)

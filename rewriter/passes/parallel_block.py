"""Parallel attention and MLP: both read the stream before the layer, and one reduction brings them home."""

from __future__ import annotations

import bisect
import operator
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import fx

from rewriter.common.errors import RewriterError
from rewriter.ir import Program, bypass
from rewriter.ir.marks import Marks, Mode, in_stream, mark, marks, new_call, stream_index
from rewriter.ir.residual import Block, blocks_of, by_layer, computes, read_index
from rewriter.passes.base import Effect, LayerModes, Reducing, record
from rewriter.passes.phases import PhasedPass
from rewriter.passes.residual_rewrite import chosen_blocks, layers_passed_over, replace_stream_value, settle_reads
from rewriter.passes.selection import Selection, resolve

PARALLEL = Mode("parallel", "reads what the block beside it reads", "Parallel")


@dataclass(frozen=True)
class ParallelBlock(PhasedPass):
    """x ← x + attn(norm(x)) + mlp(norm(x)) (PaLM, arXiv 2204.02311, section 2; GPT-J).

    In the selected `layers` the MLP reads what attention reads. `norm` says which norm serves both: "attention" or
    "mlp" (one norm, whose weights fit one of the two), or "own" (each keeps its own). With one norm, both halves read
    one value, and `fuse_projections` makes one projection of their entries. Under tensor parallelism `merge_reductions`
    makes one reduction of the two.

    Raises RewriterError for a layer that is not attention followed by an MLP, and for one without entry norms where one
    is to serve both.
    """

    layers: Selection = "all"
    norm: Literal["attention", "mlp", "own"] = "attention"

    name: ClassVar[str] = "parallel_block"
    effect: ClassVar[Effect] = "approximating"

    def apply(self, program: Program) -> Program:
        selected = chosen_blocks(program, self.name, self.layers)
        chosen = by_layer(selected)
        for layer, members in chosen.items():
            kinds = [b.kind for b in members]
            if len(kinds) != 2 or kinds[0] != "attention" or kinds[1] in ("attention", "parallel"):
                raise RewriterError(
                    f"parallel_block: layer {layer} has the blocks {', '.join(kinds)}: expected attention, then an MLP."
                    " Leave it out of the selection."
                )
            for block in members:
                if block.carried != (block.skip,):
                    raise RewriterError(
                        f"parallel_block: block {block.path} does more than to add to the residual stream as it is (it "
                        "scales, norms, casts or mixes it): expected x + f(x). Use ladder, or leave its layer out of "
                        "the selection."
                    )
        graph, _ = program.edit()
        blocks = blocks_of(graph, program.modules)
        for first, _ in chosen.values():
            self._join(program, graph, blocks[first.index], blocks[first.index + 1])
        _renumber(graph)
        rewired = settle_reads(program, graph, self.name)
        summary = f"attention and MLP of {len(chosen)} layers side by side"
        return record(rewired, self, summary, layers_passed_over(program, selected, self.layers))

    def reference_modes(self, count: int, reducing: Reducing) -> LayerModes:
        return {layer: {"mode": "parallel", "norm": self.norm} for layer in resolve(self.layers, count)}

    def _join(self, program: Program, graph: fx.Graph, attention: Block, mlp: Block) -> None:
        start = next(n for n in graph.nodes if marks(n).stream == attention.index)
        for node in mlp.branch:
            for source in node.all_input_nodes:
                if source not in mlp.branch and read_index(source) == mlp.index:
                    node.replace_input_with(source, start)
        if self.norm != "own":
            self._share_norm(program, attention, mlp)
        for node in attention.branch:
            mark(node, block=mlp.index)
        with graph.inserting_before(mlp.add):
            written, *others = (*attention.writes, *mlp.writes)
            for write in others:
                written = new_call(graph, Marks(layer=attention.layer, block=mlp.index), operator.add, written, write)
            total = graph.call_function(operator.add, (start, written))
        replace_stream_value(mlp.add, total, PARALLEL)
        bypass(attention.add, start)

    def _share_norm(self, program: Program, attention: Block, mlp: Block) -> None:
        first, second = (_entry_norm(program, block) for block in (attention, mlp))
        if self.norm == "mlp":
            first.append(second)  # it has to be there when attention begins
            first, second = second, first
        second.replace_all_uses_with(first)


def _entry_norm(program: Program, block: Block) -> fx.Node:
    """The one module through which the block reads the stream, a norm. Raises RewriterError where there is none."""
    entries = [n for n in block.branch if any(read_index(s) is not None for s in n.all_input_nodes)]
    if len(entries) != 1 or entries[0].op != "call_module" or computes(program.modules[str(entries[0].target)]):
        raise RewriterError(
            f"parallel_block: block {block.path} reads the residual stream without a norm, so no norm can serve both "
            "halves. Use norm: own."
        )
    return entries[0]


def _renumber(graph: fx.Graph) -> None:
    """Number stream values and blocks anew, after some of them went. Block b writes stream value b + 1."""
    left = sorted(stream_index(n) for n in graph.nodes if in_stream(n))
    for node in graph.nodes:
        known = marks(node)
        if known.stream is not None:
            mark(node, stream=bisect.bisect_left(left, known.stream))
        if known.reads is not None:
            mark(node, reads=bisect.bisect_right(left, known.reads) - 1)
        if known.block is not None:
            mark(node, block=bisect.bisect_left(left, known.block + 1) - 1)
        if known.writes is not None:
            mark(node, writes=bisect.bisect_left(left, known.writes + 1) - 1)

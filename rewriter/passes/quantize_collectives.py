"""Messages that travel quantized: reductions over "tp", and another function on every number of ranks; keys and values
over "sp", and the same function on all."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from rewriter.common.errors import RewriterError
from rewriter.ir import Program, args_of, ops, reachable
from rewriter.ir.marks import in_stream, marks
from rewriter.ir.op_semantics import starts_sum
from rewriter.kernels import SMALLEST_BLOCK, parse_format, vector_bytes
from rewriter.passes.base import Effect, Pass, Scope, record
from rewriter.passes.phases import PhasedPass
from rewriter.passes.selection import Selection, resolve
from rewriter.passes.sequence.sequence_plans import AXIS, attention_shapes, sequence_plan
from rewriter.passes.sequence_parallel import replanned


@dataclass(frozen=True)
class QuantizeCollectives(PhasedPass):
    """AR(f) → D(Q(f_p + Σ_{r≠p} D(Q(f_r)))) for the slice that rank p owns (ZeRO++, arXiv 2306.10209, section 3.3, in
    one hop; Q quantizes in blocks with a scale each, D is its inverse).

    A block's all-reduce over `axis` becomes: quantize, all-to-all, dequantize and sum in fp32, quantize, all-gather,
    dequantize. The owner's part is added as it is, and all ranks, the owner too, take the dequantized sum: equal bits.
    The gradient is the identity, as without it.

    Over "sp" it is attention's keys and values: softmax(q D(Q(k))ᵀ) D(Q(v)). The rank that computed them quantizes each
    head's vector of a token by itself, and every rank computes with the same D(Q(·)), that one too, in backward as
    well; so grids, rings and exchanges of heads compute one function, on any number of ranks. Queries, outputs,
    log-sum-exps and gradients travel exact; the gradient of k is that of D(Q(k)). A head's vector is filled up to whole
    blocks.

    `format` is a name of `rewriter.kernels`, such as int8 or int4-hadamard@64. A message of less than `min_bytes` bytes
    (the tensor's, before quantization; over "sp" a rank's keys and values of a layer) travels exact, decided at run
    time: a decode step's messages take as long as their latency, so that fewer bytes gain nothing; measured gains begin
    at 1 to 2 MB.

    Left exact: the vocabulary's collectives (one reduction, whose error would enter every layer, and the logits
    themselves) and reductions inside blocks (norm statistics, a number per token).

    Over "tp", `layers` selects the layers whose blocks' reductions travel quantized; a second pass may give others
    another format. Over "sp" all layers share one plan.

    The adapted checkpoint is not concerned: one device sends nothing. Raises RewriterError for a format that does not
    exist or names two hops, on one rank, where no block ends in a reduction, and where a reduction carries the residual
    stream itself (desync with resync: mean); over "sp" where tokens are not sharded, and for blocks longer than a
    head's vector.
    """

    format: str
    axis: Literal["tp", "sp"] = "tp"
    min_bytes: int = 1 << 20
    layers: Selection = "all"

    name: ClassVar[str] = "quantize_collectives"
    effect: ClassVar[Effect] = "approximating"
    scope: ClassVar[Scope] = "runtime"

    def __post_init__(self) -> None:
        super().__post_init__()
        if "/" in self.format:
            inside, _, between = self.format.partition("/")
            raise RewriterError(
                f"format: {self.format} names two hops (inside the node / between nodes), and {self.axis} is one mesh "
                f"axis, which is reduced in one hop. Give {inside} or {between}"
            )
        try:
            parse_format(self.format)
        except ValueError as error:
            raise RewriterError(f"format: {error}") from None
        if self.min_bytes < 0:
            raise RewriterError(f"min_bytes: {self.min_bytes}; expected a number of bytes from 0 (quantize everything)")
        if self.axis == AXIS and self.phase == "prompt":
            raise RewriterError("phase: prompt; over sp, the keys and values of all tokens travel alike. Leave it out")
        if self.axis == AXIS and self.layers != "all":
            raise RewriterError(
                f"layers: {self.layers}; over sp, the keys and values of all layers travel alike. Leave it out"
            )

    def check_mesh(self, mesh: Mapping[str, int]) -> None:
        if mesh.get(self.axis, 1) == 1:
            raise RewriterError(f"{self.name}: one rank sends nothing. Give --{self.axis} 2 or more.")

    def shrunken(self, kept: Sequence[int], count: int, plan: ops.SequencePlan | None = None) -> Sequence[Pass]:
        """It has to quantize small messages too, and short keys."""
        short = replace(parse_format(self.format), block=SMALLEST_BLOCK)
        if self.axis == AXIS:
            return [replace(self, format=str(short), min_bytes=0)]
        return super(QuantizeCollectives, replace(self, min_bytes=0)).shrunken(kept, count, plan)

    def apply(self, program: Program) -> Program:
        self.check_mesh(program.mesh)
        return self._keys_and_values(program) if self.axis == AXIS else self._reductions(program)

    def _reductions(self, program: Program) -> Program:
        graph, _ = program.edit()
        reductions = [n for n in graph.nodes if starts_sum(n) and args_of(n)[1] == self.axis]
        chosen = set(resolve(self.layers, program.source.num_layers))
        blocks = [n for n in reductions if marks(n).layer in chosen]
        if not blocks:
            chosen_layers = "" if self.layers == "all" else f" of the layers {self.layers}"
            raise RewriterError(
                f"{self.name}: no block{chosen_layers} ends in a reduction over {self.axis}. Put tensor_parallel "
                "before it in the recipe; where it is, it notes why it split no block"
            )
        for node in blocks:
            if node.kwargs:
                raise RewriterError(
                    f"{self.name}: {node.name} is quantized already ({node.kwargs['format']}). Leave out the second"
                )
            # what is summed has the residual stream in it, and not only what blocks add to it
            summed = reachable(node.all_input_nodes, lambda n: () if n.op == "call_module" else n.all_input_nodes)
            if any(map(in_stream, summed)):
                raise RewriterError(STREAM.format(node.name))
            node.kwargs = {"format": self.format, "min_bytes": self.min_bytes}
        size = f" where they have {self.min_bytes:,} bytes or more" if self.min_bytes else ""
        summary = f"{len(blocks)} of {len(reductions)} all-reduces travel as {self.format}{size}"
        return record(program, self, summary, graph=graph)

    def _keys_and_values(self, program: Program) -> Program:
        plan, format = sequence_plan(program), parse_format(self.format)
        if plan is None:
            raise RewriterError(
                f"{self.name}: every rank has all tokens, and no keys travel. Put sequence_parallel before it in the "
                "recipe"
            )
        if plan.quantized is not None:
            raise RewriterError(
                f"{self.name}: keys and values are quantized already ({plan.quantized}). Leave out the second"
            )
        effects = []
        for shape in attention_shapes(program):
            sizes = (shape.head_dim, shape.value_dim)
            if format.block > max(SMALLEST_BLOCK, *sizes):
                # the longest block that fills up none of these vectors; the smallest that there is, where none does
                longest = max(SMALLEST_BLOCK, math.gcd(*sizes) & -math.gcd(*sizes))
                raise RewriterError(
                    f"{self.name}: blocks of {format.block} are longer than a head's vector of {max(sizes)} elements, "
                    f"which would be filled up with zeros. Give {format.name}@{longest}"
                )
            wire, exact = sum(vector_bytes(format, n) for n in sizes), sum(sizes) * shape.dtype_bytes
            effects.append(f"{shape.layers} attentions, {wire} bytes of a head's key and value instead of {exact}")
        size = f" where a rank has {self.min_bytes:,} bytes of them or more" if self.min_bytes else ""
        summary = f"keys and values travel as {format}{size}: {'; '.join(effects)}"
        plan = replace(plan, quantized=str(format), min_bytes=self.min_bytes)
        return record(program, self, summary, **replanned(program, plan))


STREAM = (
    "quantize_collectives: {} carries the residual stream itself (desync with resync: mean), of which quantization "
    "would lose what is small beside its outliers. Use resync: sum"
)


def is_quantized(program: Program) -> bool:
    """True if anything of `program` travels quantized."""
    plan = sequence_plan(program)
    keys = plan is not None and plan.quantized is not None
    return keys or any(starts_sum(n) and n.kwargs for n in program.graph.nodes)


def least_quantized(program: Program) -> float:
    """Bytes of the smallest message that travels quantized; infinite where none does."""
    plan = sequence_plan(program)
    sizes = [n.kwargs.get("min_bytes", 0) for n in program.graph.nodes if starts_sum(n) and n.kwargs]
    return min([*sizes, *([plan.min_bytes] if plan is not None and plan.quantized else [])], default=math.inf)


def exact(program: Program) -> Program:
    """`program` with messages that are exact: what it would compute without quantization."""
    return _with(program, lambda _: {}, quantized=None, min_bytes=0)


def always_quantized(program: Program) -> Program:
    """`program` with every message quantized that may be, however small: what long prefills compute."""
    return _with(program, lambda known: {**known, "min_bytes": 0} if known else {}, min_bytes=0)


def _with(program: Program, change: Callable[[Mapping[str, Any]], Mapping[str, Any]], **of_the_plan: Any) -> Program:
    plan = sequence_plan(program)
    if plan is not None:
        program = program.with_(**replanned(program, replace(plan, **of_the_plan)))
    graph, _ = program.edit()
    for node in graph.nodes:
        if starts_sum(node):
            node.kwargs = dict(change(node.kwargs))
    return program.with_(graph=graph)

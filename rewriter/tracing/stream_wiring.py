"""The wiring of the whole model with its residual stream marked.

Some layers leave the residual add to a child (`self.mlp(x, residual)`). Such children are inlined: their own forward is
traced as part of the layer, so that the add stands in the wiring. Where that is more than sums of what their children
give (attention), only the add that ends their body is taken out.
"""

from __future__ import annotations

import operator

from torch import fx

from rewriter.analysis.residual import NoStream, annotate, is_add
from rewriter.common.errors import RewriterError
from rewriter.ir import Module, args_of
from rewriter.ir.marks import layer_of
from rewriter.tracing.assemble import ModelTracer, SurroundingGraph
from rewriter.tracing.flat_tokens import keep_tokens
from rewriter.tracing.flatten import flatten


def wire(tracer: ModelTracer, around: SurroundingGraph) -> tuple[fx.Graph, dict[str, Module]]:
    """(wiring of the whole model, modules by full path).

    A model without a residual stream is wired too: it can still be sharded, and a pass that needs the stream says why
    there is none.
    """
    plain = graph, modules = _flat(tracer, around)
    while True:
        try:
            annotate(graph, len(tracer.layers))
            return graph, modules
        except NoStream as error:
            if not _inline(tracer, error.node):
                break
        except RewriterError:
            break
        try:
            graph, modules = _flat(tracer, around)
        except RewriterError:  # the inside of a child that was inlined cannot be represented: left as it was
            break
    tracer.inlined.clear()
    tracer.split.clear()
    return plain


def _flat(tracer: ModelTracer, around: SurroundingGraph) -> tuple[fx.Graph, dict[str, Module]]:
    graph, modules = flatten(tracer, around)
    keep_tokens(graph, modules)
    return graph, modules


def _inline(tracer: ModelTracer, node: fx.Node) -> bool:
    """Bring the add of the child that gives `node`, or a summand of it, into the wiring; False where there is none."""
    summands = [n for n in node.all_input_nodes if n.target is operator.getitem] if is_add(node) else [node]
    for value in summands:
        call = args_of(value)[0] if value.target is operator.getitem else value
        if call.op == "call_module":
            index = layer_of(call)
            name = str(call.target).removeprefix(f"{tracer.path}.{index}.")
            if tracer.inline_child(index, name) or tracer.split_sum(index, name):
                return True
    return False

"""The wiring of the whole model with its residual stream marked.

Some layers leave the residual add to a child (`self.mlp(x, residual)`). Such children are inlined: their own forward is
traced as part of the layer, so that the add stands in the wiring. Where that is more than sums of what their children
give (attention), only the add that ends their body is taken out.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

from torch import fx

from rewriter.common.errors import RewriterError
from rewriter.ir import Body, Leaf, Module, args_of, drop_dead_nodes, ops
from rewriter.ir.marks import layer_of
from rewriter.ir.op_semantics import kind_of
from rewriter.ir.residual import NoStream, annotate, is_add
from rewriter.tracing.assemble import ModelTracer, SurroundingGraph
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


# --- layers that lay their tokens out in one dimension


_RESHAPES = ("reshape", "view")


def keep_tokens(graph: fx.Graph, modules: Mapping[str, Module]) -> None:
    """Take such pairs out of a wiring, in place; where anything else reads the flat tokens, they stay."""
    for node in list(graph.nodes):
        if _flattens(node):
            source = node.all_input_nodes[0]
            if (restored := _until_restored(node, source, modules)) is not None:
                for back in restored:
                    back.replace_all_uses_with(back.all_input_nodes[0])
                node.replace_all_uses_with(source)
    drop_dead_nodes(graph)


def _flattens(node: fx.Node) -> bool:
    """True if a node is `x.reshape(-1, x.size(-1))`."""
    if node.op != "call_method" or node.target not in _RESHAPES or len(node.args) != 3 or node.args[1] != -1:
        return False
    size, width = node.args[2], ("call_method", "size", (node.args[0], -1))
    return isinstance(size, fx.Node) and (size.op, size.target, size.args) == width


def _until_restored(flat: fx.Node, source: fx.Node, modules: Mapping[str, Module]) -> list[fx.Node] | None:
    """The nodes that give all that comes from `flat` the shape of `source` again; None where a value stays flat."""
    restored: list[fx.Node] = []
    seen: set[fx.Node] = set()
    todo = list(flat.users)
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if _restores(node, source):
            restored.append(node)
        elif _treats_tokens_alike(node, modules):
            todo += node.users
        else:
            return None
    inside = {flat, *seen}
    whole = all(n in inside for node in seen - set(restored) for n in node.all_input_nodes)
    return restored if restored and whole else None


def _restores(node: fx.Node, source: fx.Node) -> bool:
    """True if a node is `y.view(source.shape)`."""
    if node.op != "call_method" or node.target not in _RESHAPES or len(node.args) != 2:
        return False
    shape = node.args[1]
    return isinstance(shape, fx.Node) and shape.target is getattr and shape.args == (source, "shape")


def _treats_tokens_alike(node: fx.Node, modules: Mapping[str, Module]) -> bool:
    if node.op == "call_function":
        return node.target in (operator.add, operator.mul, ops.dropout)
    module = modules.get(str(node.target)) if node.op == "call_module" else None
    if isinstance(module, Leaf):
        return module.kind in ("Linear", "Conv1D", "LayerNorm", "Dropout")
    return isinstance(module, Body) and all(
        kind_of(n) == "pointwise" for n in module.graph.nodes if n.op in ("call_function", "call_module")
    )

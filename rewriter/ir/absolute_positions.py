"""Parts of a program that are right for some positions only: those that count positions themselves, or
look them up in a table that ends.

With a key/value cache the tokens of a call are not the first ones, so a body or wiring that numbers them from 0 would
be silently wrong. What feeds nothing but the bias of an attention may count: attention refuses a bias with a cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import fx

from rewriter.common.text_settings import context_length
from rewriter.ir import Body, Leaf, Module, Program, args_of, called_module, ops, placeholders, walk_modules
from rewriter.ir.op_semantics import argument, aten, function_of, kind_of
from rewriter.ir.row_positions import by_position, tells_padding


def counts_tokens(program: Program) -> str | None:
    """Description of where tokens are numbered by their place in the call; None when they are not."""
    biases = set(_bias_inputs(program))
    for node in program.graph.nodes:
        if _counts(node) and not _ends_in_bias(node, biases):
            return f"the model numbers the tokens of a call itself ({node.target})"
    for path, module in walk_modules(program.modules):
        if isinstance(module, Body):
            for node in module.graph.nodes:
                if _counts(node) and not _ends_in_bias(node, set()):
                    return f"{path} numbers the tokens of a call itself ({node.target})"
    return None


def _counts(node: fx.Node) -> bool:
    value = node.meta.get("val")
    dynamic = isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)
    sized = function_of(node) == "count" and (dynamic or any(True for _ in node.all_input_nodes))
    return node.op == "call_function" and (sized or node.target is ops.additive_mask)


def _bias_inputs(program: Program) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(call, value) of the wiring where the called body uses the value for biases only."""
    for node in program.graph.nodes:
        module = called_module(node, program.modules)
        if not isinstance(module, Body):
            continue
        for placeholder, value in zip(placeholders(module.graph), node.args, strict=False):
            if isinstance(value, fx.Node) and placeholder.users and _ends_in_bias(placeholder, set()):
                yield node, value


def _ends_in_bias(node: fx.Node, biases: set[tuple[fx.Node, fx.Node]]) -> bool:
    """True if everything that is made of `node` is a bias of attention."""
    for user in node.users:
        if user.target is ops.attention:
            if node in user.args or node is user.kwargs.get("sinks"):
                return False
        elif user.op == "call_function":
            if user.target is not aten.sym_size.int and not _ends_in_bias(user, biases):
                return False
        elif (user, node) not in biases:
            return False
    return True


def most_tokens(program: Program) -> int:
    """For how many tokens of one text the model has positions: by its config, and by the rows of its tables."""
    said, rows = context_length(program.source.config), position_table(program)
    return said if rows is None else min(said, rows)


def position_table(program: Program) -> int | None:
    """For how many positions the model has vectors, where it looks them up in a table; None where it computes them."""
    original = by_position(program.origin or program)
    first = {node: 0 for node in placeholders(original.graph) if node.target == "position_ids"}
    return min(_tables(original.graph, original.modules, first), default=None)


def _tables(graph: fx.Graph, modules: Mapping[str, Module], offsets: Mapping[fx.Node, int]) -> Iterator[int]:
    """The positions of every table that is read at one of `offsets`, nodes that are the position plus a number."""
    known = dict(offsets)
    for node in graph.nodes:
        args = args_of(node)
        module = called_module(node, modules)
        if isinstance(module, Body):
            inside = zip(placeholders(module.graph), args, strict=False)
            given = {inner: known[outer] for inner, outer in inside if isinstance(outer, fx.Node) and outer in known}
            yield from _tables(module.graph, module.modules, given) if given else ()
        elif isinstance(module, Leaf) and module.kind == "Embedding" and args[0] in known:
            yield module.parameters["weight"][0] - known[args[0]]
        elif kind_of(node) == "lookup":
            places = argument(node, "index") or argument(node, "indices")
            index = places[0] if isinstance(places, (list, tuple)) else places
            rows = _rows(args[0], argument(node, "dim") or 0, modules) if index in known else None
            if rows is not None:
                yield rows - known[index]
        elif args and isinstance(args[0], fx.Node) and args[0] in known:
            if node.target in _SAME or kind_of(node) == "cast" or _is_zeroed_at_padding(node):
                known[node] = known[args[0]]
            elif node.target is aten.add.Tensor and isinstance(args[1], int):
                known[node] = known[args[0]] + args[1]


def _is_zeroed_at_padding(node: fx.Node) -> bool:
    return function_of(node) == "mul" and tells_padding(args_of(node)[1])


def _rows(table: fx.Node, dim: int, modules: Mapping[str, Module]) -> int | None:
    """The size of a table; of one that a module gives, of its constant. None where it is neither known."""
    while "val" not in table.meta and table.op == "call_function" and table.all_input_nodes:  # a cast
        table = table.all_input_nodes[0]
    module = called_module(table, modules)
    if isinstance(module, Body):
        (constant, *_) = module.graph.output_node().all_input_nodes
        value = module.buffers.get(str(constant.target))
    else:
        value = table.meta.get("val")
    size = None if value is None else value.shape[dim]
    return size if isinstance(size, int) else None


_SAME = frozenset(
    getattr(aten, name).default for name in ("reshape", "view", "unsqueeze", "squeeze", "expand", "repeat", "clone")
)

"""What of a program is right for whole sequences only: it counts positions itself instead of reading `position_ids`.

With a key/value cache the tokens of a call are not the first ones, so a body or wiring that numbers them from 0 would
be silently wrong. What feeds nothing but the bias of an attention may count: attention refuses a bias with a cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from rewriter import ops
from rewriter.analysis.op_semantics import aten, function_of
from rewriter.ir import Body, Program, called_module, placeholders, walk_modules


def counts_tokens(program: Program) -> str | None:
    """Where tokens are numbered by their place in the call, in words; None when they are not."""
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
    """(call, argument) of the wiring where the called body uses the argument for biases only."""
    for node in program.graph.nodes:
        module = called_module(node, program.modules)
        if not isinstance(module, Body):
            continue
        for placeholder, argument in zip(placeholders(module.graph), node.args, strict=False):
            if isinstance(argument, fx.Node) and placeholder.users and _ends_in_bias(placeholder, set()):
                yield node, argument


def _ends_in_bias(node: fx.Node, biases: set[tuple[fx.Node, fx.Node]]) -> bool:
    """Whether everything that is made of `node` is a bias of attention."""
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

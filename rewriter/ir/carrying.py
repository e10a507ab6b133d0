"""K(X) of a block X' = K(X) + b(X) ⊗ F in a word, and the number of streams of X."""

from __future__ import annotations

import math
import operator
from typing import Literal

from torch import fx

from rewriter.common.text_settings import stream_width
from rewriter.ir import Body, Program, args_of, placeholders
from rewriter.ir.marks import marks
from rewriter.ir.op_semantics import data_of, function_of, kind_of
from rewriter.ir.residual import Block
from rewriter.ir.shapes import is_shape, stream_shape

Carrying = Literal["as it is", "scaled", "normed", "mixed"]
_KEEPING = ("view", "permutation", "copy", "cast", "alias")  # kinds of operators that keep every number


def stream_count(program: Program) -> int:
    """Number of vectors of the hidden size that the residual stream of a token is; 1 where the config does not say."""
    shape, width = stream_shape(program), stream_width(program.source.config)
    if not is_shape(shape) or not width:
        return 1
    sizes = [size for size in shape[2:] if isinstance(size, int)]
    return max(math.prod(sizes) // width, 1) if len(sizes) == len(shape) - 2 else 1


def carrying_of(block: Block, program: Program, streams: int) -> Carrying:
    """K(X): the stream itself, its multiple by stored or computed factors, a norm of it, or a mixture of `streams`."""
    other: Carrying = "mixed" if streams > 1 else "normed"
    waiting = [node for node in block.carried if node is not block.skip]
    seen: set[fx.Node] = set()
    found: set[Carrying] = set()
    while waiting:
        node = waiting.pop()
        if node in seen or node is block.skip or marks(node).carry != block.index or not node.all_input_nodes:
            continue
        seen.add(node)
        if node.target is operator.getitem and node.all_input_nodes[0].op == "call_module":
            call = node.all_input_nodes[0]
            if not _hands_on(call, args_of(node)[1], program):
                found.add(other)
            continue
        if function_of(node) in ("mul", "div", "add"):
            found.add("scaled")
        elif kind_of(node) not in _KEEPING:
            found.add(other)
        waiting += data_of(node)
    return other if other in found else "scaled" if found else "as it is"


def _hands_on(call: fx.Node, place: object, program: Program) -> bool:
    """True if a module returns one of its inputs, in another form at most, at a place of its results."""
    body = program.modules.get(str(call.target))
    if not isinstance(body, Body) or not isinstance(place, int):
        return False
    node = args_of(body.graph.output_node())[0][place]
    while node not in placeholders(body.graph):
        if kind_of(node) not in _KEEPING:
            return False
        node = node.all_input_nodes[0]
    return True

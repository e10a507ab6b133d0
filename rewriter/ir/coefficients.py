"""Coefficients of a block X' = K(X) + b(X) ⊗ F: what it computes of the stream to multiply the stream and F by.

A mixing matrix of hyper-connections and a gate of what is added are coefficients. A norm in K is none: it is what the
block carries on, not what it multiplies that by.
"""

from __future__ import annotations

import operator

from torch import fx

from rewriter.ir.marks import marks
from rewriter.ir.op_semantics import data_of, function_of, kind_of
from rewriter.ir.residual import Block, is_add, is_scaling, read_index

_KEEPING = ("view", "permutation", "copy", "cast", "alias")  # kinds of operators that keep every number


def coefficients_of(block: Block) -> tuple[fx.Node, ...]:
    """The nodes of K and b that depend on the stream and do not carry it on, in order; empty where K is the stream, a
    norm of it or a multiple by constants, and b a constant. What sums inside the block make is neither.

    Of a product of two values that both depend on the stream, the one that is the stream itself is carried on, and the
    other is a coefficient; where that is neither or both, both are carried on.
    """
    own = [n for n in block.add.graph.nodes if marks(n).carry == block.index]
    made, summed = set[fx.Node](), set(block.writes)  # of the stream; sums inside the block, of what it writes
    for node in own:
        if summed.intersection(data_of(node)):
            summed.add(node)
        elif any(s in made or _is_read(s, block) for s in data_of(node)):
            made.add(node)
    carrying: set[fx.Node] = set()
    waiting = [n for n in block.carried if n in made]
    while waiting:
        node = waiting.pop()
        if node not in carrying:
            carrying.add(node)
            waiting += [s for s in _carrying_sources(node, block, made) if s in made]
    return tuple(n for n in own if n in made and n not in carrying)


def coefficient_calls(block: Block) -> dict[str, tuple[int, ...]] | None:
    """By path, the modules whose results are coefficients of a block, and the places of these where others of its
    results carry the stream on, none where all are coefficients; None where the wiring computes some by itself."""
    found, places = coefficients_of(block), dict[str, tuple[int, ...]]()
    for node in found:
        sources = [s for s in data_of(node) if s not in found and (marks(s).carry == block.index or _is_read(s, block))]
        if node.op == "call_module":
            places[str(node.target)] = ()
        elif sources:
            if node.target is not operator.getitem or sources[0].op != "call_module":
                return None
            path, place = str(sources[0].target), node.args[1]
            assert isinstance(place, int)
            places[path] = (*places.get(path, ()), place)
    return places


def _is_read(node: fx.Node, block: Block) -> bool:
    return read_index(node, block.index) is not None


def _carrying_sources(node: fx.Node, block: Block, made: set[fx.Node]) -> list[fx.Node]:
    """Of what a node that carries the stream on is computed from, what carries it on as well."""
    sources = [s for s in data_of(node) if s in made or _is_read(s, block)]
    alone = [s for s in sources if _is_stream(s, block, made)]
    return alone if len(alone) == 1 and not is_add(node) else sources


def _is_stream(node: fx.Node, block: Block, made: set[fx.Node]) -> bool:
    """True if a value is the stream: its numbers, or multiples of them by constants."""
    if node not in made:
        return _is_read(node, block)
    sources = [s for s in data_of(node) if s in made or _is_read(s, block)]
    scales = is_scaling(node) or function_of(node) == "mul"
    return len(sources) == 1 and (scales or kind_of(node) in _KEEPING) and _is_stream(sources[0], block, made)

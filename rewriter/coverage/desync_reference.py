"""Desync of a model as its reference needs it said: which reductions are kept, and what no rank shares."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from rewriter.analysis.residual import Block
from rewriter.passes.residual_rewrite import split_writes
from rewriter.verify.per_rank_reference import LayerMode


def desync_modes(blocks: Sequence[Block], n: int) -> dict[int, LayerMode]:
    """Every layer desynced, the last of every `n` reductions kept, for the blocks of a tensor-parallel program."""
    kept: dict[int, list[bool]] = {}
    reductions = 0
    for block in blocks:
        reduced = bool(split_writes(block, "desync")[0])
        reductions += reduced
        kept.setdefault(block.layer, []).append(reduced and reductions % n == 0)
    return {layer: LayerMode("desync", keep=tuple(choices)) for layer, choices in kept.items()}


def computed_whole(blocks: Sequence[Block]) -> set[str]:
    """Paths of the modules behind writes that every rank computes in full, in a tensor-parallel program."""
    return {
        str(node.target)
        for block in blocks
        for write in split_writes(block, "desync")[1]
        for node in _behind(write, set(block.branch))
        if node.op == "call_module"
    }


def _behind(write: fx.Node, inside: set[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    todo = [write]
    while todo:
        node = todo.pop()
        if node in inside and node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found

"""Seeded faults: programs that are wrong in one way each. Every one must fail a test."""

from __future__ import annotations

from rewriter import ops
from rewriter.analysis.residual import residual_blocks, stream_values
from rewriter.program import Program


def _reroute(program: Program, block_index: int, read: int) -> Program:
    """Block `block_index` reads stream value `read` instead of what it reads."""
    block = residual_blocks(program)[block_index]
    graph, env = program.edit()
    stream = stream_values(program.graph)
    for node in block.branch:
        env[node].replace_input_with(env[stream[block.reads[0]]], env[stream[read]])
    return program.with_(graph=graph)


def blocks_swapped(program: Program, layer: int) -> Program:
    """Attention and MLP of a ladder layer read each other's stream value."""
    attention, mlp = (b for b in residual_blocks(program) if b.layer == layer)
    return _reroute(_reroute(program, attention.index, mlp.reads[0]), mlp.index, attention.reads[0])


def transition_drained(program: Program, first_ladder_layer: int) -> Program:
    """The first ladder attention waits for the MLP before it."""
    attention = next(b for b in residual_blocks(program) if b.layer == first_ladder_layer)
    return _reroute(program, attention.index, attention.index)


def reduction_missing(program: Program, number: int) -> Program:
    """The `number`-th all-reduce of the wiring's layers is gone: each rank keeps its partial."""
    graph, _ = program.edit()
    found = [
        n for n in graph.nodes if n.target in (ops.all_reduce, ops.all_reduce_start) and n.meta["layer"] is not None
    ]
    start = found[number]
    for node in [*(u for u in list(start.users) if u.target is ops.all_reduce_wait), start]:
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    return program.with_(graph=graph)

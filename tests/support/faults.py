"""Seeded faults: programs that are wrong in one way each. Every one must fail a test."""

from __future__ import annotations

import operator
from dataclasses import fields, replace

from torch import fx

from rewriter.ir import Body, Module, Program, ops
from rewriter.ir.marks import Marks, in_stream, marks, set_marks, stream_index
from rewriter.ir.residual import residual_blocks, stream_values


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
        n for n in graph.nodes if n.target in (ops.all_reduce, ops.all_reduce_start) and marks(n).layer is not None
    ]
    start = found[number]
    for node in [*(u for u in list(start.users) if u.target is ops.all_reduce_wait), start]:
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    return program.with_(graph=graph)


# What differs by rank


def kept_reduction_dropped(program: Program, number: int = 0) -> Program:
    """The `number`-th resynchronisation by mean does not happen: x_r + f_r goes on, on each rank."""
    graph, _ = program.edit()
    kept = _of_desync(graph, ops.all_reduce)[number]
    partial, share = kept.args[0].args
    with graph.inserting_before(kept):
        own = graph.call_function(operator.add, (share.args[0], partial))
    return _replaced(program, graph, kept, own)


def mean_for_sum(program: Program) -> Program:
    """The first resynchronisation by sum is one by mean: what ranks added alone survives as its mean."""
    graph, _ = program.edit()
    total = _of_desync(graph, ops.all_reduce)[0]
    kept = next(user for user in total.users)
    stream = next(n for n in graph.nodes if marks(n).stream == stream_index(kept) - 1)
    partial = total.args[0].args[1]
    with graph.inserting_before(kept):
        share = graph.call_function(operator.mul, (stream, 1 / program.mesh["tp"]))
        mean = graph.call_function(ops.all_reduce, (graph.call_function(operator.add, (partial, share)), "tp"))
    return _replaced(program, graph, kept, mean)


def shares_forgotten(program: Program) -> Program:
    """Nothing is multiplied by 1 / P where a sum over ranks is taken."""
    graph, _ = program.edit()
    for node in _of_desync(graph, operator.mul):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    return program.with_(graph=graph)


def partial_forgotten(program: Program, block: int, operand: int = 0) -> Program:
    """Only one `operand` is left of the sum, taken in `block`, of what ranks added before and what they add there."""
    graph, _ = program.edit()
    added = [n for n in _of_desync(graph, operator.add) if marks(n).writes == block and not in_stream(n)]
    return _replaced(program, graph, added[0], added[0].args[operand])


def own_partial_omitted(program: Program, block: int) -> Program:
    """The block reads the stale stream alone."""
    graph, _ = program.edit()
    entered = _own_partial_of(graph, block)
    return _replaced(program, graph, entered, entered.args[0])


def own_partial_of_another_block(program: Program, block: int) -> Program:
    """The rank's own partial that the block adds is that of the block before the right one."""
    graph, _ = program.edit()
    value, earlier = _own_partial_of(graph, block), _own_partial_of(graph, block - 1)
    value.args = (value.args[0], earlier.args[1])
    return program.with_(graph=graph)


def own_partial_stored(program: Program, block: int) -> Program:
    """What the block read, with the rank's own partial in it, goes on as the stream."""
    graph, _ = program.edit()
    value = _own_partial_of(graph, block)
    stream = next(n for n in graph.nodes if marks(n).stream == block + 1)
    before = next(n for n in graph.nodes if marks(n).stream == block)
    stream.replace_input_with(before, value)
    return program.with_(graph=graph)


def read_elsewhere(program: Program, layer: int, back: int) -> Program:
    """The first block of `layer` reads the stream as it was `back` blocks before it."""
    first = next(b for b in residual_blocks(program) if b.layer == layer)
    return _reroute(program, first.index, first.index - back)


def parallel_mlp_reads_attention(program: Program, layer: int) -> Program:
    """The MLP of a parallel layer (each half with its own norm) reads the stream with this attention in it."""
    block = next(b for b in residual_blocks(program) if b.layer == layer)
    graph, env = program.edit()
    norm = [env[n] for n in block.branch if any(in_stream(s) for s in n.all_input_nodes)][-1]
    with graph.inserting_before(norm):
        fresh = graph.call_function(operator.add, (env[block.skip], env[block.writes[0]]))
    norm.replace_input_with(env[block.skip], fresh)
    return program.with_(graph=graph)


def biases_on_rank(program: Program, every: bool) -> Program:
    """The biases of exits are added whole: by every rank, or by the first one alone."""

    def changed(module: Module) -> Module:
        if isinstance(module, Body):
            return replace(module, modules={name: changed(inner) for name, inner in module.modules.items()})
        if "bias_share" not in module.options:
            return module
        options = {name: value for name, value in module.options.items() if name != "bias_share"}
        return replace(module, options=options, kind="Linear" if every else module.kind)

    return program.with_(modules={path: changed(module) for path, module in program.modules.items()})


def norms_of_another_rank(program: Program) -> Program:
    """Untied norms hold the weights of the ranks in reverse order."""
    return program.with_(
        parameters={
            name: replace(p, ranges=p.ranges[::-1]) if p.ranges and name.endswith("layernorm.weight") else p
            for name, p in program.parameters.items()
        }
    )


def _of_desync(graph: fx.Graph, target: object) -> list[fx.Node]:
    return [n for n in graph.nodes if n.target is target and marks(n).writes is not None]


def _own_partial_of(graph: fx.Graph, block: int) -> fx.Node:
    """The node that block `block` reads: the stale stream and the rank's own partial."""
    readers = [n for n in graph.nodes if marks(n).block == block]
    return next(s for n in readers for s in n.all_input_nodes if marks(s).reads is not None)


def _replaced(program: Program, graph: fx.Graph, old: fx.Node, new: fx.Node) -> Program:
    """`new` for `old`, which it may have as an input. It is a stream value if `old` was, and it is none."""
    own = {f.name: value for f in fields(Marks) if (value := getattr(marks(new), f.name)) != f.default}
    new.meta = {**old.meta, **new.meta}
    set_marks(new, replace(marks(old), **own))
    old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    graph.erase_node(old)
    return program.with_(graph=graph)
